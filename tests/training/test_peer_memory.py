"""`peer_memory`: memory that ranks map from each other. If one rank cannot, all give up."""

import types

import numpy
import pytest

from chainer_bspmm.training import peer_memory

SIZE = 100
DTYPE = numpy.dtype('f')
CHUNKS = ('f', 2), ('d', 1)
VECTORS = [(1, DTYPE), (70, numpy.dtype('d'))]
FAILS = 'get', 0, 2, 'prepare', 'another, get', 'another, open', 'one GPU', 'vectors'
OWN = 4096  # address
OTHERS = {0: 10**6, 2: 2 * 10**6}


class Runtime:
    """Stand-in for CUDA's runtime on rank 1 of 3."""

    CUDARuntimeError = type('CUDARuntimeError', (RuntimeError,), {})

    def __init__(self):
        self.fails = None
        self.opened = []
        self.closed = []
        self.events = []

    def memset(self, address, value, n_bytes):
        assert address == OWN and value == 0
        assert n_bytes >= 2 * 3 * 8 * (SIZE + 1 + 2 * 70)  # 8 bytes for 32 bits of an element

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
        self.events.append('unmap')

    def _fail(self, where):
        if self.fails == where:
            raise self.CUDARuntimeError


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()

    class Memory:
        ptr = OWN

        def __init__(self, n_bytes):
            pass

        def __del__(self):
            found.events.append('free')

    gpu = types.SimpleNamespace(pci_bus_id='gpu 1')
    place = types.SimpleNamespace(runtime=found, Memory=Memory, Device=lambda: gpu)
    cupy = types.SimpleNamespace(cuda=place, zeros=numpy.zeros)
    monkeypatch.setattr(peer_memory, 'cuda', types.SimpleNamespace(cupy=cupy))
    monkeypatch.setattr(peer_memory, '_kept', [])
    return found


def communicator(runtime, handle=True, is_done=True, size=3, intra_size=3, gpu=2, vectors=None):
    """Return the communicator of rank 1, to which the other ranks send these values."""
    told = []

    def allgather(mine):
        told.append(mine)
        if len(told) % 3 == 1:
            return [mine, mine, (mine[0], vectors or mine[1])]
        if len(told) % 3 == 2:
            return [handle and ('handle 0', 'gpu 0'), mine, handle and ('handle 2', 'gpu %d' % gpu)]
        return [comm.is_done, mine, True]

    comm = types.SimpleNamespace(
        rank=1, size=size, intra_size=intra_size, told=told, is_done=is_done
    )

    def barrier():
        runtime.events.append('barrier')

    comm.mpi_comm = types.SimpleNamespace(allgather=allgather, Barrier=barrier)
    return comm


def connected(comm, prepare=lambda found: None):
    return peer_memory.connected(comm, SIZE, DTYPE, CHUNKS, VECTORS, prepare)


def test_addresses_of_all_ranks(runtime):
    comm = communicator(runtime)
    prepared = []
    found = connected(comm, prepared.append)
    assert prepared.pop() is found
    assert found.data.tolist() == [OTHERS[0], OWN, OTHERS[2]]
    assert found.turn.tolist() == [0] * 3 and found.turn.dtype == numpy.uint32
    assert found.turns.tolist() == [0, 0] and found.turns.dtype == numpy.uint32
    first, second = (slot - found.data for slot in found.slots)
    assert first.tolist() == [19 * 256] * 3 and second.tolist() == [20 * 256] * 3
    assert found.fits(SIZE, DTYPE, CHUNKS)
    # Blocks count their turns, so the memory suits only the same chunks in the same order.
    other_dtype = VECTORS[1][1]
    for other in ((99, DTYPE, CHUNKS), (SIZE, other_dtype, CHUNKS), (SIZE, DTYPE, CHUNKS[::-1])):
        assert not found.fits(*other)
    del found, comm
    assert runtime.opened == list(OTHERS.values())
    assert not runtime.events  # memory that other ranks may have mapped is not freed


def test_the_same_memory_for_the_same_sizes(runtime):
    """Memory for other sizes is kept as well, because graphs may write to it."""
    comm = communicator(runtime)
    prepared = []
    first = connected(comm)
    assert connected(comm, prepared.append) is first and prepared.pop() is first
    others = peer_memory.connected(comm, SIZE, DTYPE, CHUNKS, [], prepared.append)
    assert others is not first and prepared == [others]
    assert connected(comm) is first
    assert connected(communicator(runtime)) is not first
    assert not runtime.events


@pytest.mark.parametrize('fails', ['get', 'prepare', 'another, open'])
def test_what_was_connected_before_stays_mapped(runtime, fails):
    """Captured graphs write to mapped memory, even if new graphs cannot use it."""
    connected(communicator(runtime))
    ((comm, memory),) = peer_memory._kept
    comm.told.clear()
    comm.is_done = fails != 'another, open'
    runtime.fails = fails
    assert connected(comm, lambda found: runtime._fail('prepare')) is None
    assert not runtime.closed and peer_memory._kept == [(comm, memory)]


@pytest.mark.parametrize('size, intra_size', [(1, 1), (9, 9), (3, 2)])
def test_one_rank_many_or_several_hosts(runtime, size, intra_size):
    comm = communicator(runtime, size=size, intra_size=intra_size)
    assert connected(comm) is None
    assert not comm.told


@pytest.mark.parametrize('fails', FAILS)
def test_all_give_up_where_one_has_to(runtime, fails):
    runtime.fails = fails
    another = {'another, get': {'handle': None}, 'another, open': {'is_done': False}}
    another.update({'one GPU': {'gpu': 1}, 'vectors': {'vectors': [(1, 'f')]}})
    comm = communicator(runtime, **another.get(fails, {}))
    assert connected(comm, lambda found: runtime._fail('prepare')) is None
    assert runtime.closed == runtime.opened[::-1] and not peer_memory._kept
    assert bool(runtime.opened) == (fails in (2, 'prepare', 'another, open'))
    if fails == 'vectors':
        assert len(comm.told) == 1 and not runtime.events
        return
    assert len(comm.told) == 3
    # Other ranks may have mapped this rank's memory until all have reached the barrier.
    assert runtime.events == ['unmap'] * len(runtime.opened) + ['barrier', 'free']


@pytest.mark.parametrize('n_ranks', [2, 3, 8])
def test_parts_of_the_memory_do_not_overlap(n_ranks):
    """Every rank writes 8 bytes for 32 bits of an element, in two places by turns."""
    vectors = [(1, DTYPE), (700, numpy.dtype('d')), (3, numpy.dtype('e'))]
    starts = peer_memory._starts(n_ranks, 1000, DTYPE, vectors)
    sizes = [2 * n_ranks * 8 * n_words for n_words in (1000, 1, 1400, 3)]
    assert starts[0] == 0 and len(starts) == 5
    for start, end, size in zip(starts, starts[1:], sizes):
        assert start % 16 == 0 and size <= end - start < size + 256
