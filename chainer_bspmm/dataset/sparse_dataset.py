"""`SparseDataset`: a data set that holds every molecule's adjacency as CSR, and `to_sparse`."""

import collections.abc
import itertools
import operator

from chainer_chemistry.dataset.indexers.numpy_tuple_dataset_feature_indexer import (
    NumpyTupleDatasetFeatureIndexer,
)
import numpy
from tqdm import tqdm

from chainer_bspmm.dataset import dense_examples as dense
from chainer_bspmm.dataset.molecules import Molecules

try:
    from chainer_chemistry.datasets.numpy_tuple_dataset import NumpyTupleDataset
except ImportError:  # its package needs RDKit, which is not needed here
    NumpyTupleDataset = object

CHUNK = 256  # dense matrices that are gathered at once while a sparse data set is built


class SparseExample(collections.abc.Sequence):
    """One example ``(atoms, adj, label...)`` of a `SparseDataset`: a note of where it is.

    The converter gathers from there. Elements are made when they are asked for: atoms and labels
    as the dense data set has them, ``adj`` as a `BatchedCSR` of this one graph.
    """

    __slots__ = ('molecules', 'index')

    def __init__(self, molecules, index):
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
        # To another process goes this molecule, not the whole data set.
        return SparseExample, (self.molecules.take(numpy.array([self.index])), 0)

    def __array__(self, *args, **kwargs):
        raise _no_array(self)

    def __repr__(self):
        return 'SparseExample(%s)' % ', '.join(map(repr, self))


class _Column(collections.abc.Sequence):
    """Atoms (0) or adjacency (1) of all examples, made when they are asked for."""

    def __init__(self, dataset, column):
        self._dataset = dataset
        self._column = column

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        found = self._dataset[index]
        if isinstance(found, SparseExample):
            return found[self._column]
        items = numpy.empty(len(found), object)
        for i, example in enumerate(found):
            items[i] = example[self._column]
        return items

    def __array__(self, *args, **kwargs):
        raise _no_array(self)


class SparseDataset(NumpyTupleDataset):
    """Hold atoms, adjacency as CSR, and labels of a set of molecules, each once.

    :func:`to_sparse`, :func:`from_smiles` and :meth:`load` make one. An index gives an example; a
    slice, a list or an array of indices, or one bool for each example gives a `SparseDataset` that
    shares the arrays. Chainer Chemistry's splitters, ``features[:, -1]``, `get_datasets`,
    SubDataset and pickle work as with a NumpyTupleDataset, which this class is a kind of.
    ``chainer_bspmm.concat_mols`` only gathers from it; converters that want dense arrays raise
    TypeError.

    Args:
        molecules (Molecules): the arrays.
        order (array or None): (n,) int64, the molecules that this data set has; None means all.
    """

    def __init__(self, molecules, order=None):
        self.molecules = molecules
        # Both, as a batch takes an array, and one example a Python int: that of an array is slow.
        self.order = numpy.arange(len(molecules)) if order is None else order
        self._numbers = range(len(molecules)) if order is None else None

    def __len__(self):
        return self.order.size

    def __getitem__(self, index):
        if isinstance(index, (slice, list, numpy.ndarray)):
            if isinstance(index, list) and not index:
                index = slice(0)
            order = self.order[index]
            if order.ndim != 1:
                raise IndexError(
                    'index: expected an int, a slice, or one dimension of indices, '
                    'got shape %s' % (numpy.shape(index),)
                )
            return SparseDataset(self.molecules, order)
        if self._numbers is None:
            self._numbers = self.order.tolist()
        return SparseExample(self.molecules, self._numbers[index])

    def __reduce__(self):
        return SparseDataset, (self._own(),)

    def _own(self):
        """Return the molecules that this data set has, and no others."""
        molecules = self.molecules
        if numpy.array_equal(self.order, numpy.arange(len(molecules))):
            return molecules
        return molecules.take(self.order)

    def __array__(self, *args, **kwargs):
        raise _no_array(self)

    @property
    def _datasets(self):  # what NumpyTupleDataset.save would pickle
        raise TypeError(
            'expected SparseDataset.save for a SparseDataset, got NumpyTupleDataset.save'
        )

    def get_datasets(self):
        """Return one sequence for each column; those of the labels are arrays."""
        labels = [label[self.order] for label in self.molecules.labels]
        return (_Column(self, 0), _Column(self, 1), *labels)

    @property
    def features(self):
        """The columns by two indices, as those of a NumpyTupleDataset."""
        return NumpyTupleDatasetFeatureIndexer(self)

    @property
    def converter(self):
        """The converter that goes with this data set."""
        from chainer_bspmm.dataset.converters import concat_mols  # it knows this file

        return concat_mols

    @property
    def n_relations(self):
        """Number of relations (bond types), R."""
        return self.molecules.n_relations

    @property
    def adjacency_nbytes(self):
        """Bytes that hold the adjacency (int); a part of a data set counts what it shares."""
        return self.molecules.adjacency_nbytes

    @classmethod
    def save(cls, filepath, dataset):
        """Write a data set to an ``.npz`` file that holds plain arrays, no pickled objects.

        Args:
            filepath (str): the file, ending in ``.npz``.
            dataset (SparseDataset): what to write.

        Raises:
            TypeError: another kind of data set.
        """
        if not isinstance(dataset, SparseDataset):
            raise TypeError('dataset: expected a SparseDataset, got %s' % type(dataset).__name__)
        dataset._own().save(filepath)

    @classmethod
    def load(cls, filepath):
        """Read a data set that :meth:`save` wrote.

        Args:
            filepath (str): the file.

        Returns:
            SparseDataset: on the host.

        Raises:
            ValueError: the file holds something else, or contradicts itself.
            FileNotFoundError: there is none.
        """
        return SparseDataset(Molecules.load(filepath))

    def __repr__(self):
        return '<SparseDataset: %d molecules, %d relation%s, %d columns>' % (
            len(self),
            self.n_relations,
            's'[: self.n_relations != 1],
            2 + len(self.molecules.labels),
        )


def _no_array(thing):
    return TypeError(
        '%s: expected chainer_bspmm.concat_mols or CSRConverter as the converter; the adjacency '
        'is sparse and cannot become one dense array' % type(thing).__name__
    )


def locate(batch):
    """Return the `Molecules` that all examples of a batch are from, and their indices.

    Examples of several sets, such as those that came from other processes, are brought together.
    None where some are not `SparseExample` instances, or there are none.
    """
    if isinstance(batch, SparseDataset) and len(batch):
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


def to_sparse(dataset):
    """Hold a data set's adjacency as CSR, each molecule's once.

    Shows a progress bar on a terminal.

    Args:
        dataset (sequence): examples ``(atoms, adj, label...)`` as `CSRConverter` takes them: a
            NumpyTupleDataset of Chainer Chemistry, a SubDataset or a list. Padding that it has is
            not stored, but counted: batches of ``layout='padded'`` are what they were.

    Returns:
        SparseDataset: as many examples; labels of a column are one array.

    Raises:
        TypeError: an example is no tuple of arrays.
        ValueError: no example, or what `CSRConverter` refuses; the message names the example.
    """
    if isinstance(dataset, SparseDataset):
        return dataset
    parts, columns = [], []
    with tqdm(total=len(dataset), desc='to_sparse', leave=False, disable=None) as bar:
        for first in range(0, max(len(dataset), 1), CHUNK):
            examples = [dataset[i] for i in range(first, min(first + CHUNK, len(dataset)))]
            part, labels = Molecules.from_examples(examples, 'dataset', first)
            parts.append(part)
            columns.append(labels)
            bar.update(len(examples))
    if len(set(map(len, columns))) > 1:
        raise ValueError(
            'dataset: expected as many columns in every example, got %s'
            % ' and '.join(str(2 + n) for n in sorted(set(map(len, columns))))
        )
    try:
        molecules = Molecules.concatenate(parts)
    except ValueError as error:
        raise ValueError('dataset: %s' % error) from None
    molecules.labels = [
        dense.stack(list(itertools.chain(*column)), 'dataset', 2 + i)
        for i, column in enumerate(zip(*columns))
    ]
    return SparseDataset(molecules)
