"""`DeviceDataset`: a sparse data set that lies on a GPU, where its batches are gathered."""

import numpy

import chainer
from chainer import backend as chainer_backend
from chainer.backends import cuda

from chainer_bspmm import backend
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.dataset.sparse_dataset import to_sparse
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse import build
from chainer_bspmm.sparse import validate
from chainer_bspmm.sparse.batch import send
from chainer_bspmm.sparse.batched_csr import Buffers

SHARE = 8  # one part in so many of the device's memory is what a data set may take unasked


class DeviceMolecules(Molecules):
    """Molecules of which a copy lies on a GPU; what is known of their sizes stays on the host, too.

    Pickled, they are the molecules on the host.

    Args:
        host (Molecules): where they are from; it is kept, and its arrays are shared.
        device (chainer.backend.Device): the GPU.
        max_bytes (int or None): the most that may lie there; None is no bound.

    Raises:
        ValueError: they take more bytes.

    Attributes:
        host, device: as given.
        device_nbytes (int): bytes that lie on the GPU.
        sizes, nnz, symmetric, max_atom_id: as in `Molecules`, on the host.
    """

    def __init__(self, host, device, max_bytes=None):
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
            self._source = backend.Source(
                *(_send(array, device) for array in arrays), n_relations=host.n_relations
            )

    def near(self, device):
        """Return the molecules that give batches for a device without a detour: these or `host`."""
        return self if device == self.device else self.host

    def item(self, i, column):
        """Return one element of example i, on the host, as `Molecules.item` does."""
        return self.host.item(i, column)

    def check(self, index):
        """Return indices as :meth:`gather` wants them, (n_graphs,) int32, on the host.

        Args:
            index (array): (n_graphs,) integers.

        Raises:
            TypeError: they are no integers.
            ValueError: there is none, or more than one dimension, or they are too many in all.
            IndexError: one is negative or too large.
        """
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

    def batch(self, index, layout):
        """Gather molecules into a batch on the GPU: one copy to it, and one launch.

        Args:
            index (array): (n_graphs,) integers on the host.
            layout (str): ``'packed'``; ``'padded'`` gathers on the host and sends the batch.

        Returns:
            tuple: atoms, BatchedCSR, list of labels, as from `Molecules.batch`, on the GPU.

        Raises:
            TypeError, ValueError, IndexError: see :meth:`check`; more than 2**31 - 1 columns or
            entries.

        Note:
            With more than two labels, one more launch for every two. Does not synchronise.
        """
        index = self.check(index)
        if layout != 'packed':
            atoms, adj, labels = self.host.batch(index, layout)
            atoms, *labels = send([atoms] + labels, self.device)
            return atoms, adj.to_device(self.device), labels
        sizes, nnz = self.sizes[index], self.nnz[index]
        n_rows, n_entries = int(sizes.sum()), int(nnz.sum())
        validate.fits_int32('nodes times relations', n_rows * self.n_relations)
        validate.fits_int32('non-zeros', n_entries)
        with chainer.using_device(self.device):
            buffers = self._buffers(index.size, n_rows, n_entries)
            backend.gather_batch(self._source, self.device.send(index), buffers)
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
        )
        return buffers.atoms, adj, list(buffers.labels)

    def _buffers(self, n_graphs, n_rows, nnz):
        """Return new `Buffers` for so much, whatever they hold."""
        empty, source = cuda.cupy.empty, self._source
        return Buffers(
            empty((n_rows,) + source.atoms.shape[1:], source.atoms.dtype),
            empty(n_rows + 1, numpy.int32),
            empty(nnz, numpy.int32),
            None if source.data is None else empty(nnz, source.data.dtype),
            empty(n_graphs + 1, numpy.int32),
            empty(n_graphs + 1, numpy.int32),
            [empty((n_graphs,) + label.shape[1:], label.dtype) for label in source.labels],
        )

    def gather(self, index, buffers):
        """Gather a packed batch into arrays that may be larger; can be captured in a CUDA graph.

        Of each array the part past the batch is filled as :meth:`BatchedCSR.in_buffers` says.

        Args:
            index (cupy.ndarray): (n_graphs,) int32 that passed :meth:`check`. Its values are not
                known here: whoever gives them makes sure that ``sizes[index].sum()`` rows and
                ``nnz[index].sum()`` entries fit in the buffers.
            buffers (Buffers): C-contiguous arrays of this device, of the data set's dtypes.

        Raises:
            TypeError: a dtype differs.
            ValueError: a shape or device differs, or an array is not C-contiguous.

        Note:
            Launches on the current stream; neither copies nor synchronises, nor allocates.
        """
        _check_buffers(self._source, index, buffers, self.device)
        backend.gather_batch(self._source, index, buffers)


def _max_ids(host):
    """Return (M,) the largest atom id of every molecule, 0 where it has no atom; None: features."""
    if host.atoms.ndim != 1:
        return None
    largest = numpy.zeros(len(host), numpy.int32)
    used = numpy.flatnonzero(host.sizes)
    if used.size:
        largest[used] = numpy.maximum.reduceat(host.atoms, host.starts[used])
    return largest


def _source_arrays(host):
    """Return the arrays that go to the device, those of `backend.Source` in its order."""
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


def _check_buffers(source, index, buffers, device):
    n_graphs, n_rows, nnz = index.size, buffers.indptr.size - 1, buffers.indices.size
    if (source.data is None) != (buffers.data is None):
        raise ValueError(
            'buffers.data: expected %s, as the data set, got %s'
            % tuple('None' if data is None else 'an array' for data in (source.data, buffers.data))
        )
    if len(buffers.labels) != len(source.labels):
        raise ValueError(
            'buffers.labels: expected %d, as the data set, got %d'
            % (len(source.labels), len(buffers.labels))
        )
    tables = 'i', (n_graphs + 1,)
    expected = [
        ('index', index, 'i', (n_graphs,)),
        ('buffers.atoms', buffers.atoms, source.atoms.dtype, (n_rows,) + source.atoms.shape[1:]),
        ('buffers.indptr', buffers.indptr, 'i', (n_rows + 1,)),
        ('buffers.indices', buffers.indices, 'i', (nnz,)),
        ('buffers.row_offsets', buffers.row_offsets, *tables),
        ('buffers.col_offsets', buffers.col_offsets, *tables),
    ]
    if source.data is not None:
        expected.append(('buffers.data', buffers.data, source.data.dtype, (nnz,)))
    expected += [
        ('buffers.labels[%d]' % i, buffer, label.dtype, (n_graphs,) + label.shape[1:])
        for i, (buffer, label) in enumerate(zip(buffers.labels, source.labels))
    ]
    for name, array, dtype, shape in expected:
        if array.dtype != dtype:
            raise TypeError('%s: expected %s, got %s' % (name, numpy.dtype(dtype), array.dtype))
        if array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(
                '%s: expected a C-contiguous array of shape %s, got shape %s'
                % (name, shape, array.shape)
            )
        here = chainer_backend.get_device_from_array(array)
        if here != device:
            raise ValueError('%s: expected on %s, got on %s' % (name, device.name, here.name))


class DeviceDataset(SparseDataset):
    """Hold a sparse data set on a GPU, where its batches are gathered.

    It is a `SparseDataset` in whatever is done with it: indices, slices, splitters, SubDataset and
    ``chainer_bspmm.concat_mols``; parts of it share what lies on the GPU. For this GPU, packed,
    the converter sends nothing but the numbers of the molecules. For any other device and for
    ``layout='padded'`` it gathers on the host, where the data set stays as well. Examples have
    their elements on the host. Pickled it becomes the `SparseDataset`.

    Args:
        dataset (SparseDataset or sequence): what :func:`to_sparse` takes.
        device: the GPU, as ``chainer.get_device`` takes it, such as ``0`` or ``'@cupy:1'``.
        max_bytes (int or None): the most bytes that it may take there; None means an eighth of the
            device's memory.

    Raises:
        RuntimeError: there is no GPU. ValueError: ``device`` is none, or the data set takes more
        bytes than it may. TypeError, ValueError: see :func:`to_sparse`.

    Note:
        Sends the whole data set (synchronises, once).
    """

    def __init__(self, dataset, device, max_bytes=None):
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
    def device(self):
        """The GPU (chainer.backend.Device)."""
        return self.molecules.device
