"""`DeviceDataset`: a sparse data set on a GPU, where its batches are gathered."""

from typing import Any

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.dataset.batch_form import batch_over, needs, new_buffers
from chainer_bspmm.dataset.gather_batch import gather_batch, Source
from chainer_bspmm.dataset.labels import NAMES, VaryingLabels
from chainer_bspmm.dataset.molecules import largest, Molecules
from chainer_bspmm.dataset.sparse_dataset import SparseDataset, to_sparse
from chainer_bspmm.sparse import build, check
from chainer_bspmm.sparse.batched_csr import Buffers

SHARE = 8  # default limit: 1/8 of the device's memory


class DeviceMolecules(Molecules):
    """Molecules with a copy on a GPU; the host keeps their arrays, too.

    `host`: the molecules that are copied; their arrays are shared. `device_nbytes`: size of the
    copy; more than `max_bytes` (None: no limit) is an error. Unpickled, they are `Molecules` on
    the host.
    """

    tables: Any = None  # derived from the sizes for captured steps: training/batches.py

    def __init__(self, host: Molecules, device: chainer.backend.GpuDevice, max_bytes=None):
        _check_labels(host.labels)
        super().__init__(**host.fields())
        self._symmetric = host.symmetric
        self.host = host
        self.device = device
        # Largest atom id of every molecule, 0 if it has no atoms; None for features.
        self._max_ids = None
        if host.atoms.ndim == 1:
            self._max_ids = largest(host.atoms, host.starts, host.sizes)
        source = _source_of(host)
        arrays = [array for array in (*source[:-2], *source.labels) if array is not None]
        self.device_nbytes = sum(array.nbytes for array in arrays)
        if max_bytes is not None and self.device_nbytes > max_bytes:
            raise ValueError(
                'dataset: expected at most max_bytes = %d bytes for %s, got %d; keep using the '
                'SparseDataset, whose batches are sent one by one'
                % (max_bytes, device.name, self.device_nbytes)
            )
        with chainer.using_device(device):
            *arrays, labels, n_relations = source
            sent = [None if array is None else device.send(array) for array in arrays]
            self._source = Source._make([*sent, list(map(device.send, labels)), n_relations])

    def near(self, device):
        """Return the molecules to gather from for batches on a device: these, or `host`."""
        return self if device == self.device else self.host

    def item(self, i, column):
        """Return one element of example i, on the host; see `Molecules.item`."""
        return self.host.item(i, column)

    def check(self, index):
        """Check indices of molecules and return them as :meth:`gather` needs them, int32.

        IndexError: an index is out of range; `gather` would read outside of its arrays.
        """
        least, most = index.min(), index.max()
        if least < 0 or most >= len(self):
            text = 'index: expected at least 0 and less than %d, the number of molecules, got %d'
            raise IndexError(text % (len(self), least if least < 0 else most))
        return index.astype(numpy.int32)

    def batch(self, index, layout, padded_to=None, keep_padding=False):
        """Gather molecules into a batch on the GPU, as `Molecules.batch`, with one copy to the GPU.

        The batch is packed or folded, and has no rows for stored padding: `CSRConverter.locate`
        leaves other batches to `host`.
        """
        index = self.check(index)
        max_atom_id = None if self._max_ids is None else int(self._max_ids[index].max())
        need = needs(build.rows_of(self.sizes[index], layout), self.nnz[index], max_atom_id)
        check.fits_int32('nodes times relations', need.rows * self.n_relations)
        check.fits_int32('non-zeros', need.entries)
        longest = int(self.longest[index].max())
        form = self.form(index.size, self.is_symmetric(index), longest, layout, padded_to)
        with chainer.using_device(self.device):
            if len(self) == index.size == 1 and layout == 'packed':
                buffers = self._only(need)
            else:
                buffers = new_buffers(cuda.cupy.empty, form, need)
                n = self.padded_size(index, padded_to)
                sent = self.device.send(numpy.append(index, numpy.int32(n)))
                self.gather(sent[:-1], buffers, sent[-1:] if layout == 'folded' else None)
            atoms, adj, *labels = batch_over(buffers, form, need, has_spare=False)
        return atoms, adj, labels

    def _only(self, need):
        """Return `Buffers` over the arrays of a data set's only molecule.

        Gathering it would take longer, because the kernel gathers a molecule with a single warp.
        """
        n_columns = need.rows * self.n_relations
        offsets = numpy.array([[0, need.rows], [0, n_columns]], numpy.int32)
        row_offsets, col_offsets = self.device.send(offsets)
        source = self._source
        return Buffers(
            atoms=source.atoms.copy(),  # atoms and labels may be changed, unlike the matrix
            indptr=cuda.cupy.append(source.row_starts, numpy.int32(need.entries)),
            indices=source.columns,
            data=source.data,
            row_offsets=row_offsets,
            col_offsets=col_offsets,
            row_weights=None,
            labels=[label.copy() for label in source.labels],
        )

    def gather(self, index, buffers, padded_to=None):
        """Gather a batch into `Buffers` that may be larger, on the current stream.

        Nothing is checked, copied, allocated or read on the host: `index`, (n_graphs,) int32 on the
        device, passed :meth:`check`, and its molecules fit. `padded_to`: see `gather_batch`.
        """
        gather_batch(self._source, index, buffers, padded_to)


def _check_labels(labels):
    """Raise ValueError for a column that the kernel cannot gather."""
    for position, label in enumerate(labels, 2):
        if isinstance(label, VaryingLabels):
            text = (
                'dataset[...][%d]: expected labels of one shape, got some of up to %s; keep using '
                'the SparseDataset, whose batches are padded with 0'
            )
            raise ValueError(text % (position, label.shape[1:]))
        if label.dtype.kind in NAMES:
            text = 'dataset[...][%d]: expected numbers, got names (%s); leave the column out'
            raise ValueError(text % (position, label.dtype))


def _source_of(host):
    """Return molecules on the host as a `Source` of contiguous arrays."""
    row_ends = numpy.cumsum(host.row_nnz, dtype=numpy.int64)
    row_starts = row_ends - host.row_nnz - numpy.repeat(host.entry_starts, host.sizes)
    contiguous = numpy.ascontiguousarray
    return Source(
        starts=build.starts_of(host.sizes),
        entry_starts=build.starts_of(host.nnz),
        atoms=contiguous(host.atoms),
        row_starts=row_starts.astype(numpy.int32),
        columns=contiguous(host.columns),
        data=None if host.data is None else contiguous(host.data),
        labels=list(map(contiguous, host.labels)),
        n_relations=host.n_relations,
    )


class DeviceDataset(SparseDataset):
    """Hold a sparse data set on a GPU, where its batches are gathered.

    Usable like any `SparseDataset`: indices, slices, splitters, SubDataset and
    ``chainer_bspmm.concat_mols``; parts of it share the arrays on the GPU. For packed and folded
    batches on this GPU the converter sends only the indices of the molecules. Batches for other
    devices, with ``layout='padded'`` or with stored padding are gathered on the host, where the
    data set stays as well. The elements of examples are on the host. Unpickled, it is a
    `SparseDataset`.

    Args:
        dataset (SparseDataset or sequence): an argument of :func:`to_sparse`.
        device: the GPU, as for ``chainer.get_device``, such as ``0`` or ``'@cupy:1'``.
        max_bytes (int or None): limit for the data set on the GPU; None means an eighth of the
            device's memory.

    Raises:
        RuntimeError: CuPy finds no GPU.
        ValueError: ``device`` is not a GPU, the data set exceeds the limit, or a column has labels
            of several shapes, or names; see also :func:`to_sparse`.
        TypeError: see :func:`to_sparse`.

    Note:
        Sends the whole data set (synchronises, once).
    """

    molecules: DeviceMolecules

    def __init__(self, dataset: Any, device: Any, max_bytes: int | None = None):
        if not (cuda.available and cuda.cupy.cuda.is_available()):
            raise RuntimeError(
                'device: expected a GPU that CuPy finds, got none; without one, '
                'keep using the SparseDataset'
            )
        device = chainer.get_device(device)
        if device.xp is not cuda.cupy:
            raise ValueError('device: expected a GPU, got %s' % device.name)
        host = to_sparse(dataset)._own().near(None)
        if max_bytes is None:
            max_bytes = device.device.mem_info[1] // SHARE
        super().__init__(DeviceMolecules(host, device, max_bytes))

    @property
    def device(self) -> chainer.backend.Device:
        """The GPU."""
        return self.molecules.device
