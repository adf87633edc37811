"""`DeviceDataset`: a sparse data set on a GPU, where its batches are gathered."""

from typing import Any

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.dataset.gather_batch import gather_batch
from chainer_bspmm.dataset.gather_batch import Source
from chainer_bspmm.dataset.molecules import largest
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.dataset.sparse_dataset import to_sparse
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import build
from chainer_bspmm.sparse import validate
from chainer_bspmm.sparse.batch import send
from chainer_bspmm.sparse.batched_csr import Buffers

SHARE = 8  # default limit: 1/8 of the device's memory


class DeviceMolecules(Molecules):
    """Molecules with a copy on a GPU; their sizes are also kept on the host.

    Pickled, they become the molecules on the host.

    Args:
        host (Molecules): the molecules; their arrays are shared.
        device (chainer.backend.Device): the GPU.
        max_bytes (int or None): limit for the copy; None means no limit.

    Raises:
        ValueError: the copy would be larger.

    Attributes:
        host, device: as given.
        device_nbytes (int): bytes on the GPU.
        sizes, nnz, symmetric, max_atom_id: as in `Molecules`, on the host.
    """

    tables: Any = None  # what captured steps derive from the sizes: training/batches.py

    def __init__(self, host: Molecules, device: chainer.backend.GpuDevice, max_bytes=None):
        super().__init__(**host.fields())
        self._symmetric = host.symmetric
        self.host = host
        self.device = device
        self._max_ids = _max_ids(host)
        arrays = _source_arrays(host)
        *plain, labels = arrays
        self.device_nbytes = sum(array.nbytes for array in [*plain, *labels] if array is not None)
        if max_bytes is not None and self.device_nbytes > max_bytes:
            raise ValueError(
                'dataset: expected at most max_bytes = %d bytes for %s, got %d; keep using the '
                'SparseDataset, whose batches are sent one by one'
                % (max_bytes, device.name, self.device_nbytes)
            )
        with chainer.using_device(device):
            self._source = Source(
                *(_send(array, device) for array in arrays), n_relations=host.n_relations
            )

    def near(self, device):
        """Return the copy of these molecules to gather from for a device: this one or `host`."""
        return self if device == self.device else self.host

    def item(self, i, column):
        """Return one element of example i, on the host; see `Molecules.item`."""
        return self.host.item(i, column)

    def check(self, index):
        """Check indices, and return them as :meth:`gather` needs them, (n_graphs,) int32."""
        index = numpy.asarray(index)
        if index.dtype.kind not in 'iu':
            raise TypeError('index: expected integers, got %s' % index.dtype)
        if index.ndim != 1 or not index.size:
            raise ValueError(
                'index: expected shape (n_graphs,), at least one, got %s' % (index.shape,)
            )
        least, most = index.min(), index.max()
        if least < 0 or most >= len(self):
            raise IndexError(
                'index: expected at least 0 and less than %d, the number of '
                'molecules, got %d' % (len(self), least if least < 0 else most)
            )
        return index.astype(numpy.int32)

    def batch(self, index, layout, padded_to=None, keep_padding=False):
        """Gather molecules into a batch on the GPU, as `Molecules.batch`, with one copy to it.

        One launch, and one more for every two labels after the first two; does not synchronise. A
        padded batch, and one that keeps padding, is gathered on the host and sent.
        """
        index = self.check(index)
        if layout == 'padded' or keep_padding:
            atoms, adj, labels = self.host.batch(index, layout, padded_to, keep_padding)
            atoms, *labels = send([atoms] + labels, self.device)
            return atoms, adj.to_device(self.device), labels
        folded = layout == 'folded'
        sizes, nnz = build.rows_of(self.sizes[index], layout), self.nnz[index]
        n_rows, n_entries = int(sizes.sum()), int(nnz.sum())
        validate.fits_int32('nodes times relations', n_rows * self.n_relations)
        validate.fits_int32('non-zeros', n_entries)
        if len(self) == index.size == 1 and not folded:
            return self._only(n_rows, n_entries)
        n = self.padded_size(index, padded_to) if folded else 0
        with chainer.using_device(self.device):
            buffers = self._buffers(index.size, n_rows, n_entries, folded)
            sent = self.device.send(numpy.append(index, numpy.int32(n)))
            gather_batch(self._source, sent[:-1], buffers, sent[-1:] if folded else None)
        max_atom_id = None if self._max_ids is None else int(self._max_ids[index].max())
        adj = BatchedCSR.in_buffers(
            buffers.indptr,
            buffers.indices,
            buffers.row_offsets,
            buffers.col_offsets,
            buffers.data,
            self.n_relations,
            int(sizes.max()),
            int(nnz.max()),
            max_atom_id,
            self.is_symmetric(index),
            has_spare=False,
            layout=layout,
            row_weights=buffers.row_weights,
            padded_to=padded_to,
            longest=int(self.longest[index].max()),
        )
        return buffers.atoms, adj, list(buffers.labels)

    def _only(self, n_rows, nnz):
        """Return the batch of the only molecule, from arrays that lie there: a warp gathers one."""
        source = self._source
        offsets = numpy.array([[0, n_rows], [0, n_rows * self.n_relations]], numpy.int32)
        with chainer.using_device(self.device):
            row_offsets, col_offsets = self.device.send(offsets)
            adj = BatchedCSR.in_buffers(
                cuda.cupy.append(source.row_starts, numpy.int32(nnz)),
                source.columns,
                row_offsets,
                col_offsets,
                source.data,
                self.n_relations,
                n_rows,
                nnz,
                self.max_atom_id,
                self.is_symmetric([0]),
                has_spare=False,
                longest=int(self.longest[0]),
            )
            # The matrix is not to be changed, unlike these.
            return source.atoms.copy(), adj, [label.copy() for label in source.labels]

    def _buffers(self, n_graphs, n_rows, nnz, folded=False):
        """Return new, uninitialized `Buffers` of these sizes."""
        empty, source = cuda.cupy.empty, self._source
        return Buffers(
            empty((n_rows,) + source.atoms.shape[1:], source.atoms.dtype),
            empty(n_rows + 1, numpy.int32),
            empty(nnz, numpy.int32),
            None if source.data is None else empty(nnz, source.data.dtype),
            empty(n_graphs + 1, numpy.int32),
            empty(n_graphs + 1, numpy.int32),
            empty(n_rows, numpy.float32) if folded else None,
            [empty((n_graphs,) + label.shape[1:], label.dtype) for label in source.labels],
        )

    def gather(self, index, buffers, padded_to=None):
        """Gather a batch into arrays that may be larger; can be captured in a CUDA graph.

        The rest of each array is filled as :meth:`BatchedCSR.in_buffers` describes.

        Args:
            index (cupy.ndarray): (n_graphs,) int32 that passed :meth:`check`. Its values are not
                read on the host: the caller makes sure that ``sizes[index].sum()`` rows and
                ``nnz[index].sum()`` entries fit in the buffers, folded one more row per molecule.
            buffers (Buffers): C-contiguous arrays of this device, of the data set's dtypes; those
                of a packed batch have no ``row_weights``, those of a folded one have. Not checked.
            padded_to (cupy.ndarray or None): (1,) int32, to how many atoms folded molecules are
                padded; None with a packed batch.

        Note:
            Launches on the current stream; does not copy, synchronise or allocate.
        """
        gather_batch(self._source, index, buffers, padded_to)


def _max_ids(host):
    """Return (M,) the largest atom id of every molecule, 0 without atoms; None for features."""
    if host.atoms.ndim != 1:
        return None
    return largest(host.atoms, host.starts, host.sizes)


def _source_arrays(host):
    """Return the arrays for the device, in the order of `gather_batch.Source`."""
    row_ends = numpy.cumsum(host.row_nnz, dtype=numpy.int64)
    row_starts = row_ends - host.row_nnz - numpy.repeat(host.entry_starts, host.sizes)
    return (
        build.starts_of(host.sizes),
        build.starts_of(host.nnz),
        host.atoms,
        row_starts.astype(numpy.int32),
        host.columns,
        host.data,
        host.labels,
    )


def _send(array, device):
    if isinstance(array, list):
        return [_send(label, device) for label in array]
    return None if array is None else device.send(numpy.ascontiguousarray(array))


class DeviceDataset(SparseDataset):
    """Hold a sparse data set on a GPU, where its batches are gathered.

    Usable like any `SparseDataset`: indices, slices, splitters, SubDataset and
    ``chainer_bspmm.concat_mols``; parts of it share the arrays on the GPU. For packed and folded
    batches on this GPU the converter sends only the indices of the molecules. For other devices,
    ``layout='padded'``, and batches that keep stored padding it gathers on the host, where the data
    set stays as well. The elements of examples are on the host. Pickled, it becomes the
    `SparseDataset`.

    Args:
        dataset (SparseDataset or sequence): an argument of :func:`to_sparse`.
        device: the GPU, as for ``chainer.get_device``, such as ``0`` or ``'@cupy:1'``.
        max_bytes (int or None): limit for the data set on the GPU; None means an eighth of the
            device's memory.

    Raises:
        RuntimeError: CuPy finds no GPU. ValueError: ``device`` is not a GPU, or the data set
        exceeds the limit. TypeError, ValueError: see :func:`to_sparse`.

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
        host = to_sparse(dataset)._own()
        if isinstance(host, DeviceMolecules):
            host = host.host
        if max_bytes is None:
            max_bytes = device.device.mem_info[1] // SHARE
        super().__init__(DeviceMolecules(host, device, max_bytes))

    @property
    def device(self) -> chainer.backend.Device:
        """The GPU."""
        return self.molecules.device
