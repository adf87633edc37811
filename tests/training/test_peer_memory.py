"""`peer_memory`: what a rank maps, and that all give up where one has to."""

import types

import numpy
import pytest

from chainer_bspmm.training import peer_memory

SIZE, DTYPE, N_FLAGS = 100, numpy.dtype('f'), 3
OWN, OTHERS = 4096, {0: 10**6, 2: 2 * 10**6}  # addresses


class CUDARuntimeError(RuntimeError):
    pass


class Runtime:
    """Of rank 1 of 3."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self):
        self.fails, self.opened, self.closed = None, [], []

    def memset(self, address, value, n_bytes):
        assert address == OWN and value == 0 and n_bytes >= 2 * 3 * (4 * SIZE + 4 * N_FLAGS)

    def deviceSynchronize(self):
        pass

    def ipcGetMemHandle(self, address):
        assert address == OWN
        self._fail('get')
        return 'handle 1'

    def ipcOpenMemHandle(self, handle):
        rank = int(handle.split()[1])
        self._fail(rank)
        self.opened.append(OTHERS[rank])
        return OTHERS[rank]

    def ipcCloseMemHandle(self, address):
        self.closed.append(address)

    def _fail(self, where):
        if self.fails == where:
            raise CUDARuntimeError


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    place = types.SimpleNamespace(
        runtime=found, Memory=lambda n_bytes: types.SimpleNamespace(ptr=OWN)
    )
    cupy = types.SimpleNamespace(cuda=place, zeros=numpy.zeros)
    monkeypatch.setattr(peer_memory, 'cuda', types.SimpleNamespace(cupy=cupy))
    return found


def communicator(other='handle %d', is_done=True, size=3, intra_size=3):
    told = []

    def allgather(mine):
        told.append(mine)
        if len(told) == 1:
            return [other and other % 0, mine, other and other % 2]
        return [is_done, mine, True]

    comm = types.SimpleNamespace(rank=1, size=size, intra_size=intra_size)
    comm.mpi_comm, comm.told = types.SimpleNamespace(allgather=allgather), told
    return comm


def test_addresses_of_all_ranks(runtime):
    comm, optimizer = communicator(), types.SimpleNamespace()
    found = peer_memory.connected(optimizer, comm, SIZE, DTYPE, N_FLAGS)
    assert found.data.tolist() == [OTHERS[0], OWN, OTHERS[2]]
    (n_bytes,) = set((found.flags - found.data).tolist())
    assert n_bytes >= 2 * 3 * 4 * SIZE and not n_bytes % 256
    assert found.turn.tolist() == [0, 0] and found.turn.dtype == numpy.uint32
    assert peer_memory.known(optimizer, SIZE, DTYPE, N_FLAGS) is found
    assert peer_memory.known(optimizer, SIZE - 1, DTYPE, 1) is found
    assert peer_memory.known(optimizer, SIZE + 1, DTYPE, N_FLAGS) is None
    assert peer_memory.known(optimizer, SIZE, numpy.dtype('d'), N_FLAGS) is None
    assert peer_memory.known(optimizer, SIZE, DTYPE, N_FLAGS + 1) is None
    assert not runtime.closed
    del found
    del optimizer
    assert runtime.closed == runtime.opened == list(OTHERS.values())


@pytest.mark.parametrize('size, intra_size', [(1, 1), (9, 9), (3, 2)])
def test_one_rank_many_or_several_hosts(runtime, size, intra_size):
    comm, optimizer = communicator(size=size, intra_size=intra_size), types.SimpleNamespace()
    assert peer_memory.connected(optimizer, comm, SIZE, DTYPE, N_FLAGS) is None
    assert not comm.told


@pytest.mark.parametrize('fails', ['get', 0, 2, 'another, get', 'another, open'])
def test_all_give_up_where_one_has_to(runtime, fails):
    runtime.fails = fails
    another = {'another, get': {'other': None}, 'another, open': {'is_done': False}}
    comm, optimizer = communicator(**another.get(fails, {})), types.SimpleNamespace()
    assert peer_memory.connected(optimizer, comm, SIZE, DTYPE, N_FLAGS) is None
    assert len(comm.told) == 2 and runtime.closed == runtime.opened
    assert peer_memory.known(optimizer, SIZE, DTYPE, N_FLAGS) is None
