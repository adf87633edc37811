"""References to molecules of a sparse data set: `Selection` to several, `SparseExample` to one."""

import collections.abc
import operator

import numpy

from chainer_bspmm.dataset.molecules import Molecules


class Selection:
    """Some molecules of a `SparseDataset`, in some order, as a converter takes them."""

    def __init__(self, molecules: Molecules, order=None):
        self.molecules = molecules
        self.order = numpy.arange(len(molecules)) if order is None else order

    def __len__(self):
        return self.order.size

    def __getitem__(self, index):
        return SparseExample(self.molecules, int(self.order[index]))


class SparseExample(collections.abc.Sequence):
    """One example ``(atoms, adj, label...)`` of a `SparseDataset`: a reference to its arrays.

    The converter gathers from there. Elements are made on access: atoms and labels as the dense
    data set has them, ``adj`` as a `BatchedCSR` of this one graph.
    """

    __slots__ = ('molecules', 'index')

    def __init__(self, molecules: Molecules, index: int):
        self.molecules = molecules
        self.index = index

    def __len__(self):
        return 2 + len(self.molecules.labels)

    def __getitem__(self, column):
        if isinstance(column, slice):
            return tuple(self)[column]
        column = range(len(self))[operator.index(column)]
        return self.molecules.item(self.index, column)

    def __reduce__(self):
        # Only this molecule is sent to another process, not the whole data set.
        return SparseExample, (self.molecules.take(numpy.array([self.index])), 0)

    def __array__(self, *args, **kwargs):
        raise no_array(self)

    def __repr__(self):
        return 'SparseExample(%s)' % ', '.join(map(repr, self))


def no_array(thing):
    """Return the TypeError for an attempt to make a dense array of sparse examples."""
    return TypeError(
        '%s: expected chainer_bspmm.concat_mols or CSRConverter as the converter; the adjacency '
        'is sparse and cannot become one dense array' % type(thing).__name__
    )


def locate(batch):
    """Return the `Molecules` of a batch and the indices of its examples; None if it is dense."""
    # Molecules of several data sets, for example from several processes, are merged.
    if isinstance(batch, Selection) and len(batch):
        return batch.molecules, batch.order
    if set(map(type, batch)) != {SparseExample}:
        return None
    index = numpy.fromiter(map(operator.attrgetter('index'), batch), numpy.int64, len(batch))
    sources = list(map(operator.attrgetter('molecules'), batch))
    distinct = list(dict.fromkeys(sources))
    if len(distinct) == 1:
        return distinct[0], index
    number = {source: i for i, source in enumerate(distinct)}
    source = numpy.array([number[source] for source in sources])
    order = numpy.argsort(source, kind='stable')
    groups = numpy.split(index[order], numpy.cumsum(numpy.bincount(source))[:-1])
    merged = Molecules.concatenate(
        [molecules.take(group) for molecules, group in zip(distinct, groups)]
    )
    return merged, numpy.argsort(order)
