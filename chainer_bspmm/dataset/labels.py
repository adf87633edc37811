"""Columns of labels: one array, or `VaryingLabels`, which batches pad with 0."""

import collections.abc
import itertools
import math
import operator

import numpy

import chainer

from chainer_bspmm.sparse.build import all_to_host

MAX_KINDS = 4  # most kinds of labels that an error lists
NUMBERS, NAMES = 'biuf', 'US'  # kinds of dtypes

_shape = operator.attrgetter('shape')


class VaryingLabels(collections.abc.Sequence):
    """Labels of molecules that differ in shape: arrays of one dtype and number of dimensions.

    An index gives the array of one molecule; a slice or an array of indices gives `VaryingLabels`.

    Args:
        values (array): (M,) objects, the arrays.
        dtype: dtype of the arrays.
        ndim (int): dimensions of a batch's labels, one more than an array has.
    """

    def __init__(self, values, dtype, ndim):
        self._values = values
        self.dtype = numpy.dtype(dtype)
        self.ndim = ndim

    @classmethod
    def of(cls, arrays):
        """Make labels from copies of arrays, at least one."""
        dtype = _dtype(arrays)
        copies = [numpy.array(array, dtype) for array in arrays]
        return cls(_objects(copies), dtype, 1 + arrays[0].ndim)

    def __len__(self):
        return self._values.size

    def __getitem__(self, index):
        if isinstance(index, (slice, list, numpy.ndarray)):
            return VaryingLabels(self._values[index], self.dtype, self.ndim)
        return self._values[index]

    def __array__(self, dtype=None, copy=None):
        return self._values.copy()

    @property
    def shape(self):
        """Shape (tuple) of a padded batch of all molecules."""
        largest = [0] * (self.ndim - 1)
        if len(self):
            largest = numpy.max(list(map(_shape, self._values)), axis=0).tolist()
        return (len(self), *largest)

    def arrays(self):
        """Return all values, one after the other, and the shapes, (M, ndim - 1) int64."""
        values = [numpy.empty(0, self.dtype), *map(numpy.ravel, self._values)]
        shapes = numpy.array(list(map(_shape, self._values)), numpy.int64)
        return numpy.concatenate(values), shapes.reshape(len(self), self.ndim - 1)

    @classmethod
    def from_arrays(cls, name, values, shapes):
        """Make labels from the results of :meth:`arrays`; ValueError if they do not agree."""
        if shapes.dtype.kind not in 'iu' or shapes.ndim != 2 or (shapes < 0).any():
            text = '%s: expected shapes of at least 0, (M, n) integers, got %s of shape %s'
            raise ValueError(text % (name, shapes.dtype, shapes.shape))
        ends = numpy.cumsum([math.prod(shape) for shape in shapes.tolist()], dtype=object)
        n_values = ends[-1] if ends.size else 0
        if values.shape != (n_values,):
            text = '%s: expected %d values, as many as the shapes have, got shape %s'
            raise ValueError(text % (name, n_values, values.shape))
        parts = numpy.split(values, ends[:-1].astype(numpy.int64))
        arrays = [part.reshape(shape) for part, shape in zip(parts, shapes.tolist())]
        return cls(_objects(arrays), values.dtype, 1 + shapes.shape[1])


def _dtype(arrays):
    """Return the dtype of a batch of arrays."""
    # Upstream takes the dtype of the first array. Here an integer or a float16 does not decide
    # alone: integers would cut off the fractions of floats, and float16 has no large numbers.
    first = arrays[0].dtype
    if first.kind == 'f' and first.itemsize > 2:
        return first
    return numpy.result_type(*{numpy.asarray(array).dtype for array in arrays})


def _objects(arrays):
    """Return a one-dimensional array of arrays: numpy.array would stack arrays of one shape."""
    values = numpy.empty(len(arrays), object)
    for i, array in enumerate(arrays):
        values[i] = array
    return values


def padded(labels):
    """Return labels of a batch as one array, (n_graphs, ...), padded with 0 as by upstream."""
    if isinstance(labels, VaryingLabels):
        return chainer.dataset.concat_examples(list(labels), padding=0)
    return labels


def joined(parts):
    """Concatenate a column of several data sets, with the same number of dimensions in each."""
    if all(isinstance(part, numpy.ndarray) for part in parts) and (
        len({part.shape[1:] for part in parts}) == 1
    ):
        # Upstream stacks numbers, but gives all arrays the dtype of the first.
        are_arrays = parts[0].ndim > 1 and all(part.dtype.kind in NUMBERS for part in parts)
        dtype = _dtype(parts) if are_arrays else None
        return numpy.concatenate(parts, dtype=dtype)
    return VaryingLabels.of(list(itertools.chain(*parts)))


def are_of_atoms(column, sizes):
    """Return whether a column has a row for each atom of molecules that differ in size."""
    width = getattr(column[0], 'shape', ())[1:]
    return (
        getattr(column[0], 'shape', ())[:1] == (sizes[0],)  # quick, and False for most columns
        and len(set(sizes)) > 1
        and all(getattr(value, 'shape', ()) == (n, *width) for value, n in zip(column, sizes))
    )


def labels_of(columns, name, first, sizes=(), may_be_names=True):
    """Return columns of labels as arrays, or as `VaryingLabels` where arrays differ in shape.

    Args:
        columns (list): for each column, a sequence of the values of all molecules.
        name (str), first (int): name of the examples and position of the first column, for errors.
        sizes (sequence): numbers of nodes of the molecules.
        may_be_names (bool): whether a column may be of str or bytes.

    Raises:
        ValueError: the values of a column are neither numbers nor names, or they differ in their
            number of dimensions, or two columns are a second molecule.
    """
    labels = []
    for i, column in enumerate(columns):
        position = first + i
        column = all_to_host(column)
        joined_column = _joined(column, may_be_names)
        if joined_column is None:
            raise _unsuitable(column, name, position)
        if isinstance(joined_column, VaryingLabels) and i + 1 < len(columns):
            _refuse_molecule(column, columns[i + 1], sizes, name, position)
        labels.append(joined_column)
    return labels


def _joined(column, may_be_names):
    """Return the labels of all molecules, or None if the values cannot be labels."""
    kinds = set(map(type, column))
    if all(issubclass(kind, numpy.ndarray) for kind in kinds):
        if kinds != {numpy.ndarray}:
            column = list(map(numpy.asarray, column))  # such as a numpy.memmap
        arrays = set(map(operator.attrgetter('dtype', 'shape'), column))
        if len(arrays) == 1 and column[0].ndim and column[0].dtype.kind in NUMBERS:
            # numpy.array takes several times as long, because it inspects every value.
            return numpy.concatenate(column).reshape(len(column), *column[0].shape)
        if len({shape for _, shape in arrays}) > 1:
            are_numbers = all(dtype.kind in NUMBERS for dtype, _ in arrays)
            n_dims = {len(shape) for _, shape in arrays}
            return VaryingLabels.of(column) if are_numbers and len(n_dims) == 1 else None
    try:
        stacked = numpy.array(column)
    except ValueError:
        return None
    if stacked.dtype.kind in NUMBERS:
        is_of_arrays = isinstance(column[0], numpy.ndarray)
        return stacked.astype(_dtype(column), copy=False) if is_of_arrays else stacked
    if stacked.dtype.kind in NAMES and may_be_names:
        # In a column of numbers and names, NumPy makes names of the numbers.
        are_names = all(numpy.array(value).dtype.kind in NAMES for value in column)
        return stacked if are_names else None
    return None


def _unsuitable(column, name, position):
    """Return the error for a column whose values cannot be labels."""
    shapes = list(map(numpy.shape, column))
    are_arrays = map(isinstance, column, itertools.repeat((numpy.ndarray, numpy.generic)))
    names = [x.dtype if is_array else type(x).__name__ for x, is_array in zip(column, are_arrays)]
    kinds = sorted({'%s %s' % kind for kind in zip(names, shapes)})
    if len(kinds) > MAX_KINDS:
        kinds[MAX_KINDS:] = ['%d others' % (len(kinds) - MAX_KINDS)]
    expected = 'numbers, or NumPy arrays of them'
    if len(set(shapes)) > 1:
        expected = 'labels of one shape, or NumPy arrays with the same number of dimensions'
    text = '%s[...][%d]: expected %s, got %s'
    return ValueError(text % (name, position, expected, ', '.join(kinds)))


def _refuse_molecule(column, following, sizes, name, position):
    """Raise ValueError if a column and the next one are atoms and adjacency of a molecule."""
    lengths = [len(values) for values in column]
    squares = [getattr(values, 'shape', ())[-2:] for values in following]
    if lengths != list(sizes) and squares == [(n, n) for n in lengths]:
        raise ValueError(
            '%s[...][%d]: expected labels, got the atoms of a second molecule, whose adjacency is '
            'in the next column; two molecules need another converter (docs/migration.md)'
            % (name, position)
        )
