"""The mean gradient of all ranks on hosts, by one message of each type."""

import numpy


def mean_on_host(comm, params, share):
    """Replace gradients by ``sum_i(share_i * g_i)`` over all ranks, as new arrays.

    ChainerMN's `naive` sends one message for each parameter, and waits for each. All ranks have the
    same ones, on the host. float16 is sent as float32, which MPI can add.
    """
    from mpi4py import MPI

    of_dtype = {}
    for param in params:
        of_dtype.setdefault(numpy.promote_types(param.dtype, numpy.float32), []).append(param)
    for dtype, some in sorted(of_dtype.items(), key=str):
        total = numpy.concatenate([param.grad.ravel() for param in some], dtype=dtype)
        total *= share
        comm.mpi_comm.Allreduce(MPI.IN_PLACE, total)
        ends = numpy.cumsum([param.size for param in some]).tolist()
        for param, first, last in zip(some, [0, *ends], ends):
            param.grad = total[first:last].reshape(param.shape).astype(param.dtype, copy=False)
