"""What `create_communicator` refuses; nothing of MPI is loaded before it is called."""

import os
import sys
import types

import chainer_bspmm  # noqa: F401  first
import pytest
from chainer.backends import cuda

from chainer_bspmm.multi_node import communicators, faults
from tests.support.processes import python
from tests.support.ranks import needs_mpi, on_kept_ranks


def test_nothing_of_mpi_is_imported():
    names = 'name for name in sys.modules if name.startswith(("mpi4py", "chainermn"))'
    code = 'import sys, chainer_bspmm, chainer_bspmm.training\nprint(*(%s))' % names
    assert not python('-c', code).stdout.split()


OF_4 = 'one of 4 processes.* mpi4py, Some MPI 1.2; both'


def create(name='naive', **options):
    def make(*args, **kwargs):
        return pytest.fail('was created')

    return communicators.checked(make)(name, **options)


@pytest.fixture
def mpi(monkeypatch):
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
    with pytest.raises(ImportError, match=r"pip install 'chainer_bspmm\[mpi\]'"):
        create()


@pytest.mark.parametrize(
    'name, started_by, message',
    [
        ('flat', None, "'flat' needs an MPI that was built with CUDA.*'naive'"),
        ('pure_nccl', None, "'pure_nccl' needs GPUs, .*'naive' on CPUs"),
        ('non_cuda_aware', None, "'non_cuda_aware' needs GPUs, .*'naive' on CPUs"),
        *(('naive', of, OF_4) for of in communicators.SIZES),
    ],
)
def test_what_is_refused(mpi, monkeypatch, name, started_by, message):
    """Without GPUs, and where the processes are those of another mpirun."""
    monkeypatch.setattr(cuda, 'available', False)
    monkeypatch.setattr(communicators, 'knows_gpus', lambda: False)
    monkeypatch.delenv('SLURM_PTY_PORT', raising=False)
    if started_by is not None:
        monkeypatch.setenv(started_by, '4')
    with pytest.raises(RuntimeError, match=message):
        create(name)


def test_one_process_of_a_step_of_slurm(mpi, monkeypatch):
    """That of an mpirun, or of a shell, inside of one."""
    monkeypatch.delenv('SLURM_PTY_PORT', raising=False)
    monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '4')
    assert communicators.n_started() == (4, 'SLURM_STEP_NUM_TASKS')
    monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', '1')
    assert communicators.n_started()[0] == 1
    monkeypatch.delenv('OMPI_COMM_WORLD_SIZE')
    monkeypatch.setenv('SLURM_PTY_PORT', '1234')
    assert communicators.n_started()[0] == 1


class Comm:
    rank, size, intra_size = 0, 2, 2

    def __init__(self, change=lambda found: found):
        self.mpi_comm, self._change = self, change

    def allgather(self, mine):
        return [mine, self._change(mine)]


def test_more_ranks_than_gpus(monkeypatch):
    runtime = types.SimpleNamespace(deviceGetPCIBusId=lambda i: '0000:%d' % i)
    runtime.getDeviceCount = lambda: 1
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(cuda, 'cupy', cupy)
    with pytest.raises(RuntimeError, match='got 2 ranks and 1 GPUs on .* start fewer'):
        communicators._check_number_of_gpus(Comm())
    other = Comm(lambda found: (*found[:2], ['0000:7']))  # of which each rank sees its own
    communicators._check_number_of_gpus(other)
    with pytest.raises(RuntimeError, match='got 2 ranks and 1 GPUs'):
        communicators._check_number_of_gpus(Comm(lambda found: ('elsewhere', 2, ['0000:7'])))
    runtime.getDeviceCount = lambda: 2
    communicators._check_number_of_gpus(Comm())


def test_versions_differ():
    communicators._compare_versions(Comm())
    comm = Comm(lambda found: ('elsewhere', {**found[1], 'NumPy': '0.9'}))
    with pytest.raises(RuntimeError, match=r'NumPy on all ranks, got .* and 0.9 on rank 1 \(else'):
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
    for name in ('flat', 'pure_nccl'):
        with pytest.raises(RuntimeError, match="use 'naive' on CPUs|'naive' on CPUs"):
            chainermn.create_communicator(name)


@needs_mpi
def test_refused_by_all():
    if cuda.available:
        pytest.skip('there is a GPU')
    on_kept_ranks(2, refuse)
