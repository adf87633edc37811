"""``chainermn.scatter_dataset`` for sparse data sets: each rank gets its own molecules only."""

import functools
import zlib

import numpy

from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.sparse_dataset import selection, SparseDataset
from chainer_bspmm.multi_node import faults


def sparse_too(scatter_dataset):
    """Wrap ``chainermn.scatter_dataset`` to scatter sparse data sets, too.

    A `SparseDataset`, or a SubDataset of one, becomes a `SparseDataset` on every rank, with the
    arrays of the rank's part only. ChainerMN decides on the parts: with ``force_equal_length``, the
    default, a few molecules belong to two parts if the number of molecules is not a multiple of the
    number of ranks. ValueError: ranks were given different data sets. TypeError: the data set is on
    a GPU.
    """

    @functools.wraps(scatter_dataset)
    def scatter(
        dataset,
        comm,
        root=0,
        shuffle=False,
        seed=None,
        max_buf_len=256 * 1024 * 1024,
        *,
        force_equal_length=True,
    ):
        selected = selection(dataset) if dataset is not None else None
        known = comm.mpi_comm.allgather(_fingerprint(selected))
        _check(comm, root, selected, known)
        if known[root] is None:
            return scatter_dataset(
                dataset,
                comm,
                root=root,
                shuffle=shuffle,
                seed=seed,
                max_buf_len=max_buf_len,
                force_equal_length=force_equal_length,
            )
        if comm.rank != root:
            return comm.recv_obj(source=root)
        n = len(selected)
        order = numpy.random.RandomState(seed).permutation(n) if shuffle else numpy.arange(n)
        from chainermn.datasets.scatter import _scatter_index

        for rank, first, last in _scatter_index(n, comm.size, force_equal_length):
            part = selected[order[first:last]]
            if rank == root:
                # It is a copy, not a view, so that the whole data set can be freed.
                mine = SparseDataset(part._own())
            else:
                comm.send_obj(part, dest=rank)
        return mine

    return scatter


def _fingerprint(dataset):
    """Return (number of molecules, checksum of the arrays)."""
    if dataset is None:
        return None
    checksum = 0
    for _, array in sorted(dataset._own().arrays().items()):
        if isinstance(array, numpy.ndarray):
            checksum = zlib.crc32(numpy.ascontiguousarray(array).view(numpy.uint8), checksum)
    return len(dataset), checksum


def _check(comm, root, selected, known):
    """Raise an error if ranks pass different data sets, or if the data set is on a GPU."""
    for rank, fingerprint in enumerate(known):
        if fingerprint is not None and fingerprint != known[root]:
            text = (
                'dataset: expected the data set of rank %d, or None, got another one on rank %d '
                '(%s and %s): read it on one rank only'
                % (root, rank, _in_words(known[root]), _in_words(fingerprint))
            )
            faults.raise_on(comm, root, ValueError(text))
    if comm.rank == root and selected is not None and type(selected.molecules) is DeviceMolecules:
        raise TypeError(
            'dataset: expected a SparseDataset, got a DeviceDataset: make one from the part, after '
            'scattering'
        )


def _in_words(fingerprint):
    return 'no sparse one' if fingerprint is None else '%d molecules, checksum %08x' % fingerprint
