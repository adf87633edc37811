"""Sources of a captured step's batch: the host, or a data set on the same GPU."""

from __future__ import annotations

import collections
import contextlib
import operator
from typing import Any
import weakref

import numpy

import chainer
from chainer.backends import cuda
from chainer.dataset import convert
from chainer.datasets import SubDataset

from chainer_bspmm.cuda.plans import LONG_ROW
from chainer_bspmm.dataset import batch_form, sparse_form
from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.device_dataset import DeviceMolecules, SHARE
from chainer_bspmm.dataset.labels import NAMES
from chainer_bspmm.dataset.molecules import INTEGERS
from chainer_bspmm.dataset.selection import locate, Selection, SparseExample
from chainer_bspmm.dataset.sparse_dataset import selection
from chainer_bspmm.links.embed import node_shape
from chainer_bspmm.sparse import BatchedCSR, build
from chainer_bspmm.sparse.batched_csr import fill_buffers
from chainer_bspmm.training.sizes import Capacities


class HostBatch:
    """Batch on the host: atoms, matrix and labels from a converter.

    The first `n_node_columns` labels have a row for each node.
    """

    def __init__(self, atoms, adj: BatchedCSR, labels, n_node_columns=0):
        self._arrays = atoms, adj, labels
        if adj.layout == 'padded':
            of_nodes = atoms, *labels[:n_node_columns]
            atoms, *nodes = [array.reshape((-1,) + array.shape[2:]) for array in of_nodes]
            labels = [*nodes, *labels[n_node_columns:]]
        self._rows = atoms, adj, labels
        kind_of_atoms, dtype, kinds_of_labels = batch_form.kinds_of(atoms, adj.data, labels)
        self.form = batch_form.Form(
            n_graphs=adj.n_graphs,
            n_relations=adj.n_relations,
            is_symmetric=adj.is_symmetric,
            atoms=kind_of_atoms,
            data=dtype,
            labels=kinds_of_labels,
            longest=batch_form.rounded(adj.longest),
            layout=adj.layout,
            padded_to=adj.padded_to,
            n_node_columns=n_node_columns,
        )
        self.need = batch_form.needs(
            numpy.diff(adj.row_offsets), numpy.diff(adj.indptr[adj.row_offsets]), adj.max_atom_id
        )

    def arrays_on(self, device):
        """Return the batch in ordinary form (tuple of arrays and matrix) on a device."""
        atoms, adj, labels = self._arrays
        return (device.send(atoms), adj.to_device(device), *map(device.send, labels))

    def staged(self, capacity):
        """Return name -> (shape, dtype) of the arrays that are sent."""
        return batch_form.batch_arrays(self.form, capacity)

    def write(self, views):
        """Fill the host arrays of :meth:`staged`, spare rows and entries included."""
        fill_buffers(batch_form.buffers_of(views), *self._rows)

    source = gather = fill = None
    is_fixed = False


class DeviceBatch:
    """Molecules of a `DeviceDataset`; only their indices, (n_graphs,), are sent."""

    def __init__(self, molecules: DeviceMolecules, index: numpy.ndarray, layout, padded_to):
        self.source = self._molecules = molecules
        self._index = index
        self._layout = layout
        self._padded_to = padded_to
        self._is_folded = layout == 'folded'
        # With a single molecule, all batches of this form are the same.
        self.is_fixed = len(molecules) == 1 and layout == 'packed'
        tables = _tables_of(molecules)
        rows, entries = divmod(int(numpy.add.reduce(tables.sizes.take(index))), _PACKED)
        max_rows = tables.max_rows
        if self._is_folded:
            rows += index.size
            max_rows += 1
        self.need = batch_form.Capacity(
            rows=rows,
            entries=entries,
            max_rows=max_rows,
            max_entries=tables.max_entries,
            max_atom_id=tables.max_atom_id,
        )
        is_symmetric = tables.are_symmetric or molecules.is_symmetric(index)
        longest = LONG_ROW
        if tables.longest > LONG_ROW:
            longest = batch_form.rounded(int(molecules.longest[index].max()))
        key = index.size, is_symmetric, longest, layout, padded_to
        self.form = tables.forms.get(key)
        if self.form is None:
            self.form = tables.forms[key] = molecules.form(*key)

    def arrays_on(self, device):
        atoms, adj, labels = self._molecules.batch(self._index, self._layout, self._padded_to)
        return (atoms, adj, *labels)

    def staged(self, capacity):
        arrays = {'index': (self._index.shape, 'i4')}
        return dict(arrays, padded_to=((1,), 'i4')) if self._is_folded else arrays

    def write(self, views):
        views['index'][...] = self._index
        if self._is_folded:
            views['padded_to'][...] = self._molecules.padded_size(self._index, self._padded_to)

    def gather(self, sent, buffers):
        """Launch the kernels that gather the molecules; `sent`: the arrays of :meth:`staged`."""
        self._molecules.gather(sent['index'], buffers, sent.get('padded_to'))

    def fill(self, buffers):
        """Copy the molecules to buffers; once is enough for all batches if `is_fixed`."""
        batch = self._molecules.batch(self._index, self._layout, self._padded_to)
        fill_buffers(buffers, *batch)


# Sizes from which batches of molecules on a GPU are planned.
# sizes: (M,), for every molecule its number of nodes times _PACKED plus its number of entries. One
# array holds both, because each NumPy call adds a microsecond to every step.
# max_rows, max_entries, max_atom_id: maxima over all molecules. longest: the longest row of all.
# are_symmetric: whether all molecules are symmetric. forms: a dict of the forms made so far.
_Tables = collections.namedtuple(
    '_Tables', 'sizes max_rows max_entries max_atom_id longest are_symmetric forms'
)
_PACKED = 2**32  # more than the entries of a batch, whose indices are int32


def _tables_of(molecules: DeviceMolecules) -> _Tables:
    # The tables are an attribute of the molecules, because looking them up in a weak dictionary
    # would take as long as the sums over a batch.
    if molecules.tables is None:
        molecules.tables = _Tables(
            sizes=molecules.sizes.astype('q') * _PACKED + molecules.nnz,
            max_rows=int(molecules.sizes.max(initial=0)),
            max_entries=int(molecules.nnz.max(initial=0)),
            max_atom_id=-1 if molecules.max_atom_id is None else molecules.max_atom_id,
            longest=int(molecules.longest.max(initial=0)),
            are_symmetric=bool(molecules.symmetric.all()),
            forms={},
        )
    return molecules.tables


def molecules_of(dataset):
    """Return the molecules of a data set and their order, or None if they are not kept sparse."""
    sparse = selection(dataset)
    if sparse is not None:
        return locate(sparse)
    if _is_part_of_list(dataset) and len(dataset) and isinstance(dataset[0], SparseExample):
        return locate(dataset[:])
    form = sparse_form.form_of(sparse_form.base_of(dataset))
    order = form and sparse_form.position_in_base(dataset, numpy.arange(len(dataset)))
    return None if form is None or order is None else (form.molecules, order)


def _is_part_of_list(dataset):
    # No example of another data set is looked at, because a user's code may make it.
    base = dataset
    while type(base) is SubDataset:
        base = base._dataset
    return base is not dataset and type(base) in (list, tuple)


class Resident:
    """Copy of a data set's molecules on a GPU, from which batches are gathered.

    It is made automatically. The arrays of the molecules on the host become read-only, because the
    copy would not change with them. All trainings and predictions with the same molecules share a
    copy. There is no copy if the data set is not sparse, has labels of several shapes, or needs
    more than `SHARE` allows of the free memory.
    """

    def __init__(self, dataset, device):
        self._copy = None
        selected = molecules_of(dataset)
        if selected is None or device.xp is not cuda.cupy:
            return
        host, _ = selected
        if isinstance(host, DeviceMolecules):
            return
        self._copy = _copies.get((id(host), device.name))
        if self._copy is None:
            try:
                self._copy = DeviceMolecules(host, device, device.device.mem_info[0] // SHARE)
            except ValueError:
                return
            _copies[id(host), device.name] = self._copy
        self._arrays = _arrays_of(host)
        for array in self._arrays:
            if array is not None:
                array.flags.writeable = False

    def of(self, molecules):
        """Return the copy of molecules, or the molecules if there is none or it is outdated."""
        copy = self._copy
        if copy is None or molecules is not copy.host:
            return molecules
        arrays = _arrays_of(molecules)
        is_same = len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays))
        return copy if is_same else molecules


# (id of the molecules on the host, name of the device) -> DeviceMolecules. These keep the molecules
# on the host alive, so that no other object can get the same id.
_copies = weakref.WeakValueDictionary()

_fields_of = operator.attrgetter('atoms', *INTEGERS, 'data')


def _arrays_of(molecules):
    return (*_fields_of(molecules), *molecules.labels)


class Conversion:
    """Conversion of the examples of one step, for which a user's converter is called once.

    The converter may draw random numbers or count its calls, so an eager step gets the arrays that
    were made for a captured one.
    """

    def __init__(self, examples, converter, device: chainer.backend.Device | None):
        self.examples = examples
        self.converter = converter
        self.device = device
        self._results: list[Any] = []  # what the converter returned for the host, if it was called

    @property
    def is_of_user(self):
        """Whether the converter may run a user's code."""
        return type(self.converter) is not CSRConverter

    def on_host(self):
        """Return the result of the converter for the host."""
        if not self._results:
            self._results.append(convert._call_converter(self.converter, self.examples, None))
        return self._results[0]

    def on_device(self):
        """Return the result of the converter on the device.

        If it was called for the host, copies of its arrays are sent, unless there is an object that
        only the converter can make on the device.
        """
        if self.device is None:
            return self.on_host()
        for result in self._results:
            with contextlib.suppress(_CannotSend):
                return _sent(result, self.device)
        return convert._call_converter(self.converter, self.examples, self.device)

    def arguments(self):
        """Return the result on the device as the arguments of a loss, (tuple, dict)."""
        result = self.on_device()
        if isinstance(result, tuple):
            return result, {}
        return ((), result) if isinstance(result, dict) else ((result,), {})


class _CannotSend(Exception):
    """Error: it is not known how an object is sent to a device."""


def _sent(value, device):
    """Return a converter's result on a device, or raise _CannotSend."""
    kind = type(value)
    if kind in (numpy.ndarray, cuda.ndarray) and value.dtype.kind in 'biufc':
        return device.send(value)
    if kind is BatchedCSR:
        return value.to_device(device)
    if kind is chainer.Variable:
        array = value.array if value.array is None else _sent(value.array, device)
        return chainer.Variable(array, name=value.name, requires_grad=value.requires_grad)
    if kind in (tuple, list):
        return kind(_sent(each, device) for each in value)
    if issubclass(kind, tuple) and hasattr(kind, '_make'):  # a named tuple
        return kind._make(_sent(each, device) for each in value)
    if kind in (dict, collections.OrderedDict):
        return kind((name, _sent(each, device)) for name, each in value.items())
    if value is None or kind in (bool, int, float, complex, str, bytes) or _is_scalar(value):
        return value
    raise _CannotSend


def _is_scalar(value):
    return isinstance(value, numpy.generic) and not isinstance(value, numpy.void)


class NoSparseBatch(TypeError):
    """Error: the converter makes batches that cannot be captured."""


def batch_of(conversion: Conversion, resident: Resident | None = None) -> DeviceBatch | HostBatch:
    """Return the `DeviceBatch` or `HostBatch` of a conversion, or raise NoSparseBatch."""
    if not conversion.is_of_user:
        examples, converter, device = conversion.examples, conversion.converter, conversion.device
        is_list = isinstance(examples, (list, Selection))
        located = converter.locate(examples) if is_list and converter.layout != 'padded' else None
        if located is not None:
            molecules, index = located
            if resident is not None and not converter.keeps_padding(molecules):
                molecules = resident.of(molecules)
            if isinstance(molecules, DeviceMolecules) and (
                molecules.device is device or molecules.device == device
            ):
                return DeviceBatch(molecules, index, converter.layout, converter.padded_to)
    arrays = conversion.on_host()
    if not isinstance(arrays, tuple) or len(arrays) < 2 or not isinstance(arrays[1], BatchedCSR):
        got = type(arrays).__name__
        if isinstance(arrays, tuple):
            got = '(%s)' % ', '.join(type(array).__name__ for array in arrays)
        raise NoSparseBatch(
            'converter: expected a tuple (atoms, BatchedCSR, label...), as '
            'chainer_bspmm.concat_mols makes it, got %s' % got
        )
    atoms, adj, *labels = arrays
    for array in (atoms, *labels):
        if not isinstance(array, numpy.ndarray):
            text = 'converter: expected arrays on the host for device=None, got '
            raise NoSparseBatch(text + type(array).__name__)
        if array.dtype.kind in NAMES:
            text = 'converter: expected numbers, got names (%s); leave the column out'
            raise NoSparseBatch(text % array.dtype)
    n_node_columns = 0 if conversion.is_of_user else adj.n_node_columns
    nodes = node_shape(adj)
    for i, array in enumerate((atoms, *labels)):
        is_of_graphs = i > n_node_columns
        lead = (adj.n_graphs,) if is_of_graphs else nodes
        if array.shape[: len(lead)] != lead:
            n_rows = ' x '.join(map(str, lead))
            what = 'molecules' if is_of_graphs else 'atoms'
            text = 'converter: expected a row for each of %s %s in output %d, got shape %s'
            raise NoSparseBatch(text % (n_rows, what, i and 1 + i, array.shape))
    return HostBatch(atoms, adj, labels, n_node_columns)


def capacities(dataset, n_graphs, layout):
    """Return `Capacities` for batches of a data set (any object), from its sizes if known."""
    # Padded batches have as many rows as their largest molecule demands, so the capacities of these
    # are derived from the batches.
    selected = None if layout == 'padded' else molecules_of(dataset)
    if selected is None:
        return Capacities(n_graphs)
    molecules, order = selected
    sizes = build.rows_of(molecules.sizes, layout)
    entries = molecules.nnz
    # A DeviceBatch needs room for the largest of all molecules, even if `order` leaves it out.
    largest = batch_form.needs(sizes, entries, molecules.max_atom_id)
    return Capacities(n_graphs, sizes[order], entries[order], largest)
