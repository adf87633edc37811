"""Refusals of `create_communicator`, before which no module of MPI is loaded."""

import os
import platform
import re
import sys
import types

import chainer_bspmm  # noqa: F401  first
import numpy
import pytest
from chainer.backends import cuda

from chainer_bspmm.multi_node import communicators, faults
from tests.support.processes import python
from tests.support.ranks import needs_mpi, on_kept_ranks


def test_nothing_of_mpi_is_imported():
    code = """if True:
        import sys, chainer_bspmm, chainer_bspmm.training
        print(*(name for name in sys.modules if name.startswith(('mpi4py', 'chainermn'))))
    """
    assert not python('-c', code).stdout.split()


def create(name='naive'):
    """Call `create_communicator`, whose checks must refuse."""

    def make(*args, **kwargs):
        pytest.fail('was created')

    communicators.checked(make)(name)


@pytest.fixture
def mpi(monkeypatch):
    """Stand-in for mpi4py with one process; mpi4py need not be installed."""
    world = types.SimpleNamespace(size=1, rank=0)
    module = types.SimpleNamespace(
        COMM_WORLD=world, Get_library_version=lambda: 'Some MPI 1.2, 2020', __file__='/no/library'
    )
    monkeypatch.setitem(sys.modules, 'mpi4py', types.SimpleNamespace(MPI=module))
    monkeypatch.setitem(sys.modules, 'mpi4py.MPI', module)
    for name in communicators.SIZES:
        monkeypatch.delenv(name, raising=False)
    return module


def test_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mpi4py', None)
    message = (
        'several ranks need MPI and mpi4py (import of mpi4py halted; None in sys.modules); '
        "pip install 'chainer_bspmm[mpi]' brings both"
    )
    with pytest.raises(ImportError, match='^%s$' % re.escape(message)):
        create()


NEEDS_CUDA = (
    "communicator_name: 'flat' needs an MPI that was built with CUDA, which this one was not; "
    "use 'pure_nccl' on GPUs, 'naive' on CPUs"
)
NEEDS_GPUS = "communicator_name: '%s' needs GPUs, and CuPy finds none; use 'naive' on CPUs"


@pytest.mark.parametrize(
    'name, message',
    [
        ('flat', NEEDS_CUDA),
        ('pure_nccl', NEEDS_GPUS % 'pure_nccl'),
        ('non_cuda_aware', NEEDS_GPUS % 'non_cuda_aware'),
    ],
)
def test_communicators_that_need_gpus(mpi, monkeypatch, name, message):
    monkeypatch.setattr(cuda, 'available', False)
    monkeypatch.setattr(communicators, 'knows_gpus', lambda: False)
    with pytest.raises(RuntimeError, match='^%s$' % message):
        create(name)


def test_communicators_that_need_nccl(mpi, monkeypatch):
    nccl = types.SimpleNamespace(_available=False)
    monkeypatch.setitem(sys.modules, 'chainermn', types.SimpleNamespace(nccl=nccl))
    monkeypatch.setattr(cuda, 'available', True)
    message = (
        "communicator_name: 'pure_nccl' needs NCCL, which CuPy does not find; the extras cuda12 "
        'and cuda13 of chainer_bspmm bring it (nvidia-nccl-cu12, nvidia-nccl-cu13)'
    )
    with pytest.raises(RuntimeError, match='^%s$' % re.escape(message)):
        create('pure_nccl')
    nccl._available = True
    with pytest.raises(pytest.fail.Exception, match='was created'):
        create('pure_nccl')


@pytest.mark.parametrize('number', range(4))
@pytest.mark.parametrize('answer', [0, 1])
def test_the_first_library_that_knows_decides_whether_mpi_sends_arrays_of_gpus(
    mpi, monkeypatch, number, answer
):
    """The process may have loaded MPI itself, and mpi4py may contain it."""
    asked = []

    def load(name):
        asked.append(name)
        if len(asked) <= number:
            if name is None:
                return types.SimpleNamespace()  # the process has no function of this name
            raise OSError('no such library')
        return types.SimpleNamespace(MPIX_Query_cuda_support=lambda: answer)

    monkeypatch.setattr(communicators.ctypes, 'CDLL', load)
    assert communicators.knows_gpus() is (bool(answer) and number < 3)
    assert asked == [None, 'libmpi.so.40', mpi.__file__][: number + 1]


@pytest.mark.parametrize('size', ['', 'many'])
def test_a_launcher_that_tells_no_number_has_started_one_process(mpi, monkeypatch, size):
    monkeypatch.setenv('PMI_SIZE', size)
    assert communicators.n_started() == (1, '')


@pytest.mark.parametrize('variable', communicators.SIZES)
def test_processes_that_another_mpirun_has_started(mpi, monkeypatch, variable):
    monkeypatch.delenv('SLURM_PTY_PORT', raising=False)
    monkeypatch.setenv(variable, '4')
    message = (
        'this is one of 4 processes (%s), but MPI sees it alone: the program that started '
        "it belongs to another MPI than mpi4py's, Some MPI 1.2; both must be the same, and srun "
        'needs --mpi=pmix' % variable
    )
    with pytest.raises(RuntimeError, match='^%s$' % re.escape(message)):
        create()


def test_one_process_of_a_step_of_slurm(mpi, monkeypatch):
    """A process that mpirun or a shell starts inside a Slurm step counts as one."""
    monkeypatch.delenv('SLURM_PTY_PORT', raising=False)
    monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '4')
    assert communicators.n_started() == (4, 'SLURM_STEP_NUM_TASKS')
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '1')
    assert communicators.n_started()[0] == 1
    monkeypatch.delenv('OMPI_COMM_WORLD_SIZE')
    monkeypatch.setenv('SLURM_PTY_PORT', '1234')
    assert communicators.n_started()[0] == 1


class Comm:
    """Communicator of the first of two ranks; the value of the second one is ``change(mine)``."""

    rank = 0
    size = 2
    intra_size = 2

    def __init__(self, change=lambda mine: mine):
        self.mpi_comm = self
        self._change = change

    def allgather(self, mine):
        return [mine, self._change(mine)]


@pytest.fixture
def host_of_gpus(monkeypatch):
    """Function that sets the number of GPUs of the first rank's host."""
    runtime = types.SimpleNamespace(deviceGetPCIBusId=lambda i: '0000:%d' % i)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(cuda, 'cupy', cupy)

    def say(n_gpus):
        runtime.getDeviceCount = lambda: n_gpus

    return say


def elsewhere(mine):
    return 'elsewhere', 2, ['0000:7']


@pytest.mark.parametrize('change', [lambda mine: mine, elsewhere], ids=['one host', 'two hosts'])
def test_more_ranks_than_gpus(host_of_gpus, change):
    host_of_gpus(1)
    message = (
        'expected at most one rank for each GPU, got 2 ranks and 1 GPUs on %s: start fewer '
        '(mpirun -n), or on more hosts' % platform.node()
    )
    with pytest.raises(RuntimeError, match='^%s$' % re.escape(message)):
        communicators._check_number_of_gpus(Comm(change))


@pytest.mark.parametrize('n_gpus', [2, 3])
def test_a_gpu_for_each_rank(host_of_gpus, n_gpus):
    host_of_gpus(n_gpus)
    communicators._check_number_of_gpus(Comm())


def test_each_rank_may_see_its_own_gpu_only(host_of_gpus):
    host_of_gpus(1)
    communicators._check_number_of_gpus(Comm(lambda mine: (*mine[:2], ['0000:7'])))


@pytest.mark.parametrize(
    'name, size, expected',
    [
        ('naive', 1, []),
        ('naive', 2, ['versions']),
        ('pure_nccl', 1, []),
        ('pure_nccl', 2, ['versions', 'GPUs']),
    ],
)
def test_several_ranks_are_compared(mpi, monkeypatch, name, size, expected):
    compared = []
    monkeypatch.setattr(communicators, '_check_nccl', lambda name: None)
    for check, what in (('_compare_versions', 'versions'), ('_check_number_of_gpus', 'GPUs')):
        monkeypatch.setattr(communicators, check, lambda comm, what=what: compared.append(what))
    comm = types.SimpleNamespace(size=size)
    assert communicators.checked(lambda name, mpi_comm: comm)(name) is comm
    assert compared == expected


def test_same_versions():
    communicators._compare_versions(Comm())


def test_versions_differ():
    comm = Comm(lambda mine: ('elsewhere', {**mine[1], 'NumPy': '0.9'}))
    message = (
        'expected one version of NumPy on all ranks, got %s on rank 0 (%s) and 0.9 on rank 1 '
        '(elsewhere)' % (numpy.__version__, platform.node())
    )
    with pytest.raises(RuntimeError, match='^%s$' % re.escape(message)):
        communicators._compare_versions(comm)


def test_other_ranks_wait_for_the_one_that_tells(monkeypatch):
    waited = []
    monkeypatch.setattr(faults.time, 'sleep', waited.append)
    for rank in (0, 1):
        with pytest.raises(KeyError):
            faults.raise_on(Comm(), rank, KeyError())
    assert waited == [faults.PATIENCE]


def refuse():
    import chainermn

    assert os.environ['OMPI_COMM_WORLD_SIZE'] == '2'
    assert chainermn.create_communicator('naive').size == 2
    assert not communicators.knows_gpus()
    for name, message in (('flat', NEEDS_CUDA), ('pure_nccl', NEEDS_GPUS % 'pure_nccl')):
        with pytest.raises(RuntimeError, match='^%s$' % message):
            chainermn.create_communicator(name)


@needs_mpi
def test_refused_by_all():
    if cuda.available:
        pytest.skip('there is a GPU')
    on_kept_ranks(2, refuse)
