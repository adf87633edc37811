"""``chainermn.create_communicator`` with checks instead of segmentation faults and hangs."""

import ctypes
import functools
import os
import platform

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.multi_node import faults

# Variables in which launchers store the number of processes: Open MPI, MPICH, Slurm.
SIZES = 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_STEP_NUM_TASKS'


def checked(create):
    """Wrap ``chainermn.create_communicator``: refuse, with advice, names that cannot work here."""

    @functools.wraps(create)
    def create_communicator(communicator_name='pure_nccl', mpi_comm=None, **kwargs):
        _check_mpi()
        if communicator_name == 'flat' and not knows_gpus():
            raise RuntimeError(
                "communicator_name: 'flat' needs an MPI that was built with CUDA, which this one "
                "was not; use 'pure_nccl' on GPUs, 'naive' on CPUs"
            )
        if communicator_name in ('pure_nccl', 'non_cuda_aware'):
            _check_nccl(communicator_name)
        comm = create(communicator_name, mpi_comm, **kwargs)
        if comm.size > 1:
            _compare_versions(comm)
            if communicator_name == 'pure_nccl':
                _check_number_of_gpus(comm)
        return comm

    return create_communicator


def knows_gpus():
    """Return whether MPI can send arrays on a GPU."""
    from mpi4py import MPI

    for name in (None, 'libmpi.so.40', MPI.__file__):
        try:
            query = ctypes.CDLL(name).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        return bool(query())
    return False


def is_nccl(comm):
    """Return whether a communicator adds up arrays by NCCL, which a CUDA graph may capture."""
    from chainermn.communicators.pure_nccl_communicator import PureNcclCommunicator

    return type(comm) is PureNcclCommunicator


def n_started():
    """Return the number of processes that a launcher started, and the variable that says so."""
    for name in SIZES:
        size = os.environ.get(name, '')
        if size.isdigit():
            # An interactive shell that Slurm started for several tasks is only one process.
            is_shell = name.startswith('SLURM') and 'SLURM_PTY_PORT' in os.environ
            return (1 if is_shell else int(size)), name
    return 1, ''


def _check_mpi():
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "several ranks need MPI and mpi4py (%s); pip install 'chainer_bspmm[mpi]' brings both"
            % error
        ) from error
    size, name = n_started()
    if size > 1 and MPI.COMM_WORLD.size == 1:
        raise RuntimeError(
            'this is one of %d processes (%s), but MPI sees it alone: the program that started '
            "it belongs to another MPI than mpi4py's, %s; both must be the same, and srun needs "
            '--mpi=pmix' % (size, name, MPI.Get_library_version().split(',')[0].strip())
        )
    if MPI.COMM_WORLD.size > 1:
        faults.end_all_on_error()  # before anything that some ranks may not survive


def _check_nccl(name):
    from chainermn import nccl

    if not cuda.available:
        text = "communicator_name: '%s' needs GPUs, and CuPy finds none; use 'naive' on CPUs"
        raise RuntimeError(text % name)
    if not nccl._available:
        raise RuntimeError(
            "communicator_name: '%s' needs NCCL, which CuPy does not find; the extras cuda12 and "
            'cuda13 of chainer_bspmm bring it (nvidia-nccl-cu12, nvidia-nccl-cu13)' % name
        )


def _check_number_of_gpus(comm):
    runtime = cuda.cupy.cuda.runtime
    visible = [runtime.deviceGetPCIBusId(i) for i in range(runtime.getDeviceCount())]
    ranks = comm.mpi_comm.allgather((platform.node(), comm.intra_size, visible))
    for rank, (host, n_ranks, _) in enumerate(ranks):
        # Each rank of a host may see a different GPU, so GPUs are counted over all of them.
        n_gpus = len({gpu for other, _, gpus in ranks if other == host for gpu in gpus})
        if n_ranks > n_gpus:
            text = (
                'expected at most one rank for each GPU, got %d ranks and %d GPUs on %s: start '
                'fewer (mpirun -n), or on more hosts' % (n_ranks, n_gpus, host)
            )
            faults.raise_on(comm, rank, RuntimeError(text))


def _compare_versions(comm):
    import chainer_bspmm

    mine = {
        'Python': platform.python_version(),
        'chainer_bspmm': chainer_bspmm.__version__,
        'Chainer': chainer.__version__,
        'NumPy': numpy.__version__,
        'CuPy': cuda.cupy.__version__ if cuda.available else None,
    }
    ranks = comm.mpi_comm.allgather((platform.node(), mine))
    first_host, expected = ranks[0]
    for rank, (host, versions) in enumerate(ranks):
        for name, version in expected.items():
            if versions[name] != version:
                text = (
                    'expected one version of %s on all ranks, got %s on rank 0 (%s) and %s on rank '
                    '%d (%s)' % (name, version, first_host, versions[name], rank, host)
                )
                faults.raise_on(comm, 0, RuntimeError(text))
