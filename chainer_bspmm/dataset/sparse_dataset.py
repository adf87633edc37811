"""`SparseDataset`: a data set that holds every molecule's adjacency as CSR, and `to_sparse`."""

import collections.abc
import itertools
from typing import Any

from chainer.datasets import SubDataset
from chainer_chemistry.dataset.indexers.numpy_tuple_dataset_feature_indexer import (
    NumpyTupleDatasetFeatureIndexer,
)
import numpy

from chainer_bspmm.dataset import dense_examples
from chainer_bspmm.dataset.converters import concat_mols, CSRConverter
from chainer_bspmm.dataset.graph_data import example_of
from chainer_bspmm.dataset.labels import are_of_atoms, labels_of
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.progress import progress
from chainer_bspmm.dataset.selection import locate, no_array, Selection, SparseExample
from chainer_bspmm.sparse import check

try:
    from chainer_chemistry.datasets.numpy_tuple_dataset import NumpyTupleDataset
except ImportError:  # its package needs RDKit, which is not needed here
    NumpyTupleDataset = object

CHUNK = 256  # dense matrices gathered at once while a sparse data set is built


class _Column(collections.abc.Sequence):
    """Atoms (0) or adjacency (1) of all examples, made on access."""

    def __init__(self, dataset, column):
        self._dataset = dataset
        self._column = column

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        selected = self._dataset[index]
        if isinstance(selected, SparseExample):
            return selected[self._column]
        items = numpy.empty(len(selected), object)
        for i, example in enumerate(selected):
            items[i] = example[self._column]
        return items

    def __array__(self, *args, **kwargs):
        raise no_array(self)


class SparseDataset(Selection, NumpyTupleDataset):
    """Data set of molecules, each stored once: atoms, adjacency as CSR, labels.

    :func:`to_sparse`, :func:`from_smiles` and :meth:`load` make one. An index gives an example; a
    slice, a list or an array of indices, or one bool for each example gives a `SparseDataset` that
    shares the arrays. Chainer Chemistry's splitters, ``features[:, -1]``, `get_datasets`,
    SubDataset and pickle work as with a NumpyTupleDataset, of which this is a subclass.
    ``chainer_bspmm.concat_mols`` only gathers from it; converters that need dense arrays raise
    TypeError.

    Args:
        molecules (Molecules): the arrays.
        order (array or None): (n,) int64, the molecules of this data set; None means all.
    """

    def __init__(self, molecules: Molecules, order: numpy.ndarray | None = None):
        if not isinstance(molecules, Molecules):
            text = 'molecules: expected Molecules, got %s; to_sparse converts a data set'
            raise TypeError(text % type(molecules).__name__)
        super().__init__(molecules, order)
        # The order as Python ints, for single examples: reading them from an array is slow.
        self._numbers = range(len(molecules)) if order is None else None

    def __getitem__(self, index):
        if isinstance(index, (slice, list, numpy.ndarray)):
            if not isinstance(index, slice):
                index = numpy.asarray(index)
                if index.shape == (0,):  # NumPy takes an empty list for an array of floats
                    index = slice(0)
            order = self.order[index]
            if order.ndim != 1:
                text = 'index: expected an int, a slice, or one dimension of indices, got shape %s'
                raise IndexError(text % (numpy.shape(index),))
            return SparseDataset(self.molecules, order)
        if self._numbers is None:
            self._numbers = self.order.tolist()
        return SparseExample(self.molecules, self._numbers[index])

    def __reduce__(self):
        return SparseDataset, (self._own(),)

    def _own(self):
        """Return `Molecules` with this data set's examples only, in its order."""
        molecules = self.molecules
        if numpy.array_equal(self.order, numpy.arange(len(molecules))):
            return molecules
        return molecules.take(self.order)

    def __array__(self, *args, **kwargs):
        raise no_array(self)

    @property
    def _datasets(self):  # NumpyTupleDataset.save would pickle it
        raise TypeError(
            'expected SparseDataset.save for a SparseDataset, got NumpyTupleDataset.save'
        )

    def get_datasets(self) -> tuple:
        """Return one sequence for each column; the columns of labels are arrays."""
        labels = [numpy.asarray(label[self.order]) for label in self.molecules.labels]
        return (_Column(self, 0), _Column(self, 1), *labels)

    @property
    def features(self):
        """Indexer by example and column, as in a NumpyTupleDataset."""
        return NumpyTupleDatasetFeatureIndexer(self)

    @property
    def converter(self) -> CSRConverter:
        """The converter for this data set."""
        return concat_mols

    @property
    def n_relations(self) -> int:
        """Number of relations (bond types), R."""
        return self.molecules.n_relations

    @property
    def adjacency_nbytes(self) -> int:
        """Bytes of the adjacency; a part of a data set counts the shared arrays."""
        return self.molecules.adjacency_nbytes

    @classmethod
    def save(cls, filepath: str, dataset: 'SparseDataset') -> None:
        """Write a data set to an ``.npz`` file of plain arrays, without pickled objects.

        Args:
            filepath (str): the file, ending in ``.npz``.
            dataset (SparseDataset): the data set.

        Raises:
            TypeError: another kind of data set.
        """
        if not isinstance(dataset, SparseDataset):
            raise TypeError('dataset: expected a SparseDataset, got %s' % type(dataset).__name__)
        dataset._own().save(filepath)

    @classmethod
    def load(cls, filepath: str) -> 'SparseDataset':
        """Read a data set that :meth:`save` wrote.

        Args:
            filepath (str): the file.

        Returns:
            SparseDataset: on the host.

        Raises:
            ValueError: the file holds something else, or its arrays are inconsistent.
            FileNotFoundError: there is no such file.
        """
        return SparseDataset(Molecules.load(filepath))

    def __repr__(self):
        return '<SparseDataset: %d molecules, %d relation%s, %d columns>' % (
            len(self),
            self.n_relations,
            's'[: self.n_relations != 1],
            2 + len(self.molecules.labels),
        )


def selection(dataset):
    """Return a data set as a `SparseDataset` that shares its arrays; None if it is not sparse."""
    if isinstance(dataset, SparseDataset):
        return dataset
    if type(dataset) is not SubDataset:
        return None
    whole = selection(dataset._dataset)
    if whole is None:
        return None
    index = numpy.arange(dataset._start, dataset._finish)
    if dataset._order is not None and index.size:
        index = numpy.asarray(dataset._order)[index]
    return whole[index]


def chunks(dataset):
    """Yield the examples of a data set as (position of the first, list of examples)."""
    for first in range(0, max(len(dataset), 1), CHUNK):
        part = slice(first, first + CHUNK)
        if type(dataset) is list:
            yield first, dataset[part]
        elif type(dataset) is NumpyTupleDataset:
            yield first, list(zip(*[column[part] for column in dataset._datasets]))
        else:
            yield first, [dataset[i] for i in range(*part.indices(len(dataset)))]


def _is_sparse(example):
    return type(example) is SparseExample


def _from_sparse(examples):
    """Return the `Molecules`, without labels, and the columns of labels of sparse examples."""
    try:
        molecules, index = locate(examples)
    except ValueError as error:
        raise ValueError('dataset: %s' % error) from None
    part = molecules.take(index)
    labels = list(map(list, part.labels))
    part.labels = []
    return part, labels


def _from_dense(examples, first, n_edge_types):
    """Return the `Molecules`, without labels, and the columns of labels of dense examples."""
    kinds = set(map(type, examples))
    if kinds != {tuple}:
        examples = [
            example_of(example, 'dataset[%d]' % i, n_edge_types)
            for i, example in enumerate(examples, first)
        ]
    gathered = dense_examples.gather(examples, 'dataset', first)
    # In graph data, an edge that is given twice stays two entries.
    as_dense = all(issubclass(kind, tuple) for kind in kinds)
    part = Molecules.from_examples(gathered, 'dataset', first, as_dense=as_dense)
    return part, gathered.labels


def to_sparse(dataset: Any, n_edge_types: int | None = None) -> SparseDataset:
    """Convert a dense data set to a sparse one, which stores every molecule once, as CSR.

    Shows a progress bar on a terminal.

    Args:
        dataset (sequence): examples ``(atoms, adj, label...)`` as `CSRConverter` takes them (a
            NumpyTupleDataset of Chainer Chemistry, a SubDataset or a list; also examples of sparse
            data sets), or graph data (a SparseGraphDataset, whose batches must be packed, a
            PaddingGraphDataset, or a list of their examples). Only the number of trailing atoms of
            id 0 without bonds is stored. `CSRConverter` decides whether they are padding
            (``strip_padding``), and makes the same batches as from the dense data set. Graph data
            are read for ``x``, the edges or ``adj``, and ``y``, if it is not None.
        n_edge_types (int or None): for a SparseGraphDataset, number of relations into which
            ``edge_attr`` divides the edges; None means one.

    Returns:
        SparseDataset: as many examples. The labels of a column are one array; if their shapes
            differ, they are kept as they are, and batches of them are padded with 0, as by
            upstream's converter.

    Raises:
        TypeError: an example is neither a tuple of arrays nor graph data.
        ValueError: no examples, or one that `CSRConverter` refuses; the message names it.
    """
    sparse = selection(dataset)
    if sparse is not None:
        return sparse
    dense_examples.check_sequence('dataset', dataset)
    if n_edge_types is not None:
        check.count('n_edge_types', n_edge_types, 1)
    if not len(dataset):
        raise ValueError('dataset: expected at least one example, got none')
    parts, columns = [], []
    are_sparse = True
    with progress(len(dataset), 'to_sparse') as advance:
        for first, examples in chunks(dataset):
            for is_sparse, group in itertools.groupby(examples, _is_sparse):
                alike = list(group)
                if is_sparse:
                    part, labels = _from_sparse(alike)
                else:
                    part, labels = _from_dense(alike, first, n_edge_types)
                first += len(alike)
                parts.append(part)
                columns.append(labels)
                are_sparse = are_sparse and is_sparse
            advance(len(examples))
    n_columns = sorted(set(map(len, columns)))
    if len(n_columns) > 1:
        got = ' and '.join(str(2 + n) for n in n_columns)
        raise ValueError(
            'dataset: expected the same number of columns in all examples, got %s' % got
        )
    try:
        molecules = Molecules.concatenate(parts)
    except ValueError as error:
        raise ValueError('dataset: %s' % error) from None
    labels = [list(itertools.chain(*column)) for column in zip(*columns)]
    sizes = molecules.full_sizes.tolist()
    for position, column in enumerate(labels, 2):
        if not are_sparse and are_of_atoms(column, sizes):
            text = (
                'dataset[...][%d]: expected labels of molecules, got a row for each atom; labels '
                'of atoms need the dense data set'
            )
            raise ValueError(text % position)
    molecules.labels = labels_of(labels, 'dataset', 2, sizes)
    return SparseDataset(molecules)
