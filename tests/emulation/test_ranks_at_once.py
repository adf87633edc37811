"""Emulated kernels of several processes, which write to each other's memory and wait for it."""

import mmap

import os
import pathlib
import random
import signal
import time
import types

import numpy
import pytest

import chainer_bspmm  # noqa: F401  first
import chainer
from chainer.backends import cuda

from chainer_bspmm.cuda import kernels
from chainer_bspmm.training import peer_memory
from chainer_bspmm.training.flat_gradients import FlatGradients
from tests.emulation.emulator import cuda_on_cpu
from tests.support.ranks import needs_mpi, on_ranks

N_TURNS = 20
FEW_TURNS = 6  # each half of the memory is used three times
RECEIVE = 'receive(received + r * stride, i, now, value[r][e])'
HALF = 'const int half = now % 2 * PEERS;\n    '
SECONDS, SOON = 80, 40  # time after which a rank is ended that waits in vain
SHAPES = (3, 5), (1025,), (0,), (2,)
VECTORS = 3, 70  # elements of vectors that are summed, too
MOST = 1e-3  # seconds by which a rank is late at most
# One rank reads late, so that others are ahead. It sleeps for longer than these need for a
# turn, also on a busy machine, where they would otherwise wait for its core.
SLOW = (
    ('#include <sched.h>', '#include <sched.h>\n#include <unistd.h>'),
    ('Sum total = 0;', 'if (rank && threadIdx.x == 0) usleep(20000); Sum total = 0;'),
    (
        'STORAGE value = x[i];',
        'if (rank && threadIdx.x == 0 && r == 0) usleep(5000); STORAGE value = x[i];',
    ),
)


class Runtime:
    """Stand-in for CUDA's runtime: processes map files of a folder instead of memory of GPUs."""

    CUDARuntimeError = OSError

    def __init__(self, folder):
        self._folder = pathlib.Path(folder)
        self._mapped = {}

    def allocate(self, n_bytes):
        path = self._folder / ('memory of %d' % os.getpid())
        numpy.full(n_bytes // 4, 1, numpy.uint32).tofile(path)  # looks as if turn 1 was over
        return self.ipcOpenMemHandle(path)

    def ipcOpenMemHandle(self, path):
        with open(path, 'r+b') as file:
            array = numpy.frombuffer(mmap.mmap(file.fileno(), 0), numpy.uint8)
        self._mapped[array.ctypes.data] = array, path
        return array.ctypes.data

    def ipcGetMemHandle(self, address):
        return self._mapped[address][1]

    def memset(self, address, value, n_bytes):
        self._mapped[address][0][:n_bytes] = value

    def ipcCloseMemHandle(self, address):
        pass

    def deviceSynchronize(self):
        return 0

    def getDevice(self):
        return 0


def stand_in(monkeypatch, folder, *replaced):
    """Return the emulator, and a list that gets all kernels that are loaded from now on."""
    device = cuda_on_cpu.Device(monkeypatch)
    source = kernels.source

    def changed(name):
        text = source(name)
        for old, new in replaced:
            text = text.replace(old, new)
        return text

    monkeypatch.setattr(kernels, 'source', changed)
    runtime = Runtime(folder)
    cuda.cupy.cuda = types.SimpleNamespace(
        runtime=runtime,
        Memory=lambda n_bytes: types.SimpleNamespace(ptr=runtime.allocate(n_bytes)),
        Device=lambda: types.SimpleNamespace(pci_bus_id=os.getpid()),
        alloc_pinned_memory=bytearray,
    )
    loaded = []
    load = kernels.load

    def noted(device_id, name, dtype_char, defines):
        loaded.append((name, dtype_char, defines))
        return load(device_id, name, dtype_char, defines)

    monkeypatch.setattr(kernels, 'load', noted)
    return device, loaded


def values_of(rank, turn, shape, number):
    """Return a rank's part of a sum; integers make sums exact."""
    rng = numpy.random.RandomState(1000 * turn + 10 * number + rank)
    return rng.randint(-50, 50, shape).astype('f')


def n_molecules(rank, turn):
    return (turn + 3 * rank) % 4 + (rank == 0)


def exchange(folder, seconds, n_turns, *replaced):
    """Exchange gradients and vectors `n_turns` times, each rank at its own pace.

    replaced: pairs of a text of the kernels and its replacement.
    """
    import chainermn

    comm = chainermn.create_communicator('naive')
    comm.allreduce_grad_dtype = None
    pace = random.Random(comm.rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        device, loaded = stand_in(monkeypatch, folder, *replaced)
        link = chainer.Link()
        for i, shape in enumerate(SHAPES):
            with link.init_scope():
                setattr(link, 'p%d' % i, chainer.Parameter(device.put(numpy.zeros(shape, 'f'))))
        optimizer = types.SimpleNamespace(target=link, communicator=comm, t=0)
        flat = FlatGradients(optimizer)
        flat.sums.begin(alone=True)
        for n in VECTORS:
            flat.sums.sum(device.put(numpy.zeros(n, 'f')))
        flat.connect()
        assert flat.has_sum and flat.peers.vectors == [(n, numpy.dtype('f')) for n in VECTORS]
        ready = set(loaded)
        loss = device.put(numpy.array(1, 'f'))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not the test's own handler
        signal.alarm(seconds)
        # One after the other: a sum between two exchanges would keep the ranks together.
        for turn in range(n_turns):
            check_gradients(flat, device, turn, loss, pace)
        for numbers in (0,), (0, 1):
            for turn in range(n_turns):
                check_vectors(flat, device, turn, numbers, pace)
        assert set(loaded) == ready  # nothing is compiled while another rank waits
        comm.mpi_comm.Barrier()  # another rank may still read this memory
        flat.peers.unmap()
        peer_memory._kept.clear()


def check_vectors(flat, device, turn, numbers, pace):
    rank = flat._comm.rank
    ranks = range(flat._comm.size)
    for alone in (False, True):  # a check repeats a step with the others' values
        flat.sums.begin(alone)
        for number in numbers:
            time.sleep(pace.uniform(0, MOST))
            of_ranks = [values_of(rank, turn, VECTORS[number], number) for rank in ranks]
            found = flat.sums.sum(device.put(of_ranks[rank]))
            numpy.testing.assert_array_equal(found, sum(of_ranks))


def check_gradients(flat, device, turn, loss, pace):
    rank = flat._comm.rank
    ranks = range(flat._comm.size)
    params = [getattr(flat._optimizer.target, 'p%d' % i) for i in range(len(SHAPES))]
    device.reachable = []
    for number, param in enumerate(params):
        param.grad = device.put(values_of(rank, turn, param.shape, number))
        device.reachable.append(param.grad)
    time.sleep(pace.uniform(0, MOST))
    weights = [n_molecules(rank, turn) for rank in ranks]
    flat.pack(weights[rank], loss, alone=True)  # others do not notice this
    flat.pack(weights[rank], loss)
    for number, param in enumerate(params):
        total = sum(
            weight * values_of(rank, turn, param.shape, number)
            for rank, weight in zip(ranks, weights)
        )
        numpy.testing.assert_array_equal(param.grad, total / numpy.float32(sum(weights)))
    assert not flat._is_bad.any()


@needs_mpi
@pytest.mark.parametrize(
    'n_ranks, seconds, n_turns, replaced',
    [
        pytest.param(2, SECONDS, N_TURNS, (), marks=pytest.mark.slow),
        pytest.param(3, SECONDS, N_TURNS, (), marks=pytest.mark.slow),
        pytest.param(2, SOON, N_TURNS, SLOW, marks=pytest.mark.slow),  # as below, without a fault
        (2, SOON, FEW_TURNS, SLOW),
    ],
)
def test_every_turn(gxx, tmp_path, n_ranks, seconds, n_turns, replaced):
    on_ranks(n_ranks, exchange, tmp_path, seconds, n_turns, *replaced)


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    'text, fault',
    [
        (RECEIVE, '(%s, true)' % RECEIVE),
        ('receive(from, n, now, weight) &&', ''),
        ('if (r != rank) send(peers', 'if (r < 0) send(peers'),
        (HALF + 'const bool', 'const int half = 0; const bool'),
        ('(half + rank) * stride, at', 'half * stride, at'),
        ('*my_turn = now;', ';'),
        ('while (r != rank && !receive(slots', 'if (r != rank && !receive(slots'),
        (HALF + 'const long long', 'const int half = 0; const long long'),
        ('*turn + !alone', '*turn + 1'),
        ('*turn = now;', ';'),
    ],
)
def test_what_is_noticed(gxx, tmp_path, text, fault):
    sources = [kernels.source(name) for name in ('flat_gradients', 'peer_sum')]
    assert sum(source.count(text) for source in sources) == 1
    done = on_ranks(2, exchange, tmp_path, SOON, N_TURNS, (text, fault), *SLOW, status=None)
    assert ' error: ' not in done.stderr  # it was compiled
