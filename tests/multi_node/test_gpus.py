"""Captured steps of two ranks that share memory, each on its GPU, and how they end."""

import os
import re
import signal
import time

from chainer_bspmm.dataset import to_sparse  # repairs Chainer before anything imports it
import chainer
import numpy
import pytest
from chainer.backends import cuda

from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.flat_gradients import FlatGradients
from chainer_bspmm.training.program import Program
from tests.multi_node.models import At, arrays_of, communicator, CONVERTERS, my_share, N_ALL
from tests.multi_node.models import optimizer_of, parameters_of_every_model, regressor
from tests.support.ranks import needs_mpi, on_ranks
from tests.support.training import molecules
from tests.support import assert_close_arrays

pytestmark = [needs_mpi, pytest.mark.gpu, pytest.mark.multi_gpu]
N_STEPS = 40
SECONDS = 60  # includes the start of processes on GPUs; a hang would last forever


def bits_of(arrays):
    return b''.join(cuda.to_cpu(arrays[name]).tobytes() for name in sorted(arrays))


def train_every_model(path):
    comm = communicator('pure_nccl')

    def check(updater):
        assert updater._driver.peers is not None  # the whole step is one launch
        bits = bits_of(arrays_of(updater.get_optimizer('main').target))
        assert len(set(comm.mpi_comm.allgather(bits))) == 1

    found = parameters_of_every_model(comm, comm.intra_rank, check)
    if comm.rank == 0:
        numpy.savez(path, **{name: cuda.to_cpu(array) for name, array in found.items()})


def test_two_gpus_are_one_large_batch(tmp_path):
    on_ranks(2, train_every_model, tmp_path / '2.npz', timeout=400)
    alone = parameters_of_every_model(None, '@cupy:0')
    with numpy.load(tmp_path / '2.npz') as file:
        assert len(file.files) == len(alone) > 50
        assert_close_arrays(file, alone)


def exchange(n_turns):
    """Replace gradients, which are integers, by their exact mean; ranks are late now and then."""
    comm = communicator('pure_nccl')
    device = chainer.get_device(comm.intra_rank)
    device.use()
    link = chainer.Link()
    sizes = (1, 1023, 1025, 70_001)
    with link.init_scope():
        for i, size in enumerate(sizes):
            setattr(link, 'p%d' % i, chainer.Parameter(numpy.zeros(size, 'f')))
    link.to_device(device)
    flat = FlatGradients(optimizer_of(link, comm))
    flat.connect()
    flat.load_kernels()
    assert flat.has_sum
    loss = device.xp.zeros((), 'f')
    params = [param for _, param in sorted(link.namedparams())]
    mine = numpy.random.RandomState(comm.rank)
    for turn in range(n_turns):
        rng = numpy.random.RandomState(turn)
        weights = rng.randint(1, 8, comm.size)
        given = [[rng.randint(-999, 1000, n).astype('f') for n in sizes] for _ in weights]
        if mine.uniform() < 0.1:
            time.sleep(mine.uniform(0, 2e-3))
        for param, gradient in zip(params, given[comm.rank]):
            param.grad = device.send(gradient)
        flat.pack(int(weights[comm.rank]), loss)
        flat.unpack()
        for param, gradients in zip(params, zip(*given)):
            total = sum(int(weight) * gradient for weight, gradient in zip(weights, gradients))
            expected = total / numpy.float32(weights.sum())
            numpy.testing.assert_array_equal(cuda.to_cpu(param.grad), expected)


def test_many_exchanges():
    on_ranks(2, exchange, 1000, timeout=200)


def updater_of(comm, name):
    """Return two updaters with one optimizer, whose batches have a few forms."""
    device = chainer.get_device(comm.intra_rank)
    model = regressor(name, 0, comm if 'norm' in name else None)
    with chainer.using_config('train', False):
        model(*CONVERTERS['packed'](molecules(2)))
    model.to_device(device)
    part = to_sparse(my_share(molecules(4 * N_ALL), comm, (7, 5)))
    optimizer = optimizer_of(model, comm)
    return [
        GraphUpdater(
            chainer.iterators.SerialIterator(part, len(part) // 4, shuffle=False),
            optimizer,
            converter=CONVERTERS['packed'],
            device=device,
            on_difference='raise',
        )
        for _ in range(2)
    ]


def train_both_ways():
    comm = communicator('pure_nccl')
    chainer.get_device(comm.intra_rank).use()
    capture = Program.capture
    for name in ('RSGCN', 'RSGCN, batch norm', 'norm of head', 'GIN'):
        found = []
        for is_captured in (True, False):
            Program.capture = capture if is_captured else lambda self: None
            first, second = updater_of(comm, name)
            for _ in range(N_STEPS):  # both updaters share memory, and take turns
                first.update()
                second.update()
            n_captured = [of.is_captured for of in first._driver.programs.values()].count(True)
            assert bool(n_captured) == is_captured
            assert first._driver.peers is second._driver.peers is not None
            found.append(bits_of(arrays_of(first.get_optimizer('main').target)))
        assert found[0] == found[1], name
        assert len(set(comm.mpi_comm.allgather(found[0]))) == 1, name


def test_captured_steps_are_those_run_eagerly():
    on_ranks(2, train_both_ways, timeout=300)


def fail(how):
    comm = communicator('pure_nccl')
    chainer.get_device(comm.intra_rank).use()
    updater, _ = updater_of(comm, 'RSGCN')
    trainer = chainer.training.Trainer(updater, (10**6, 'iteration'), out='/nowhere')
    model = updater.get_optimizer('main').target
    parts = {
        'raise': lambda: 1 // 0,
        'killed': lambda: os.kill(os.getpid(), signal.SIGKILL),
        'nan': lambda: model.predictor.embed.W.array.fill(numpy.nan),
        'nan in the last step': lambda: model.predictor.embed.W.array.fill(numpy.nan),
    }
    if comm.rank == 1:
        trainer.extend(At(N_STEPS, parts[how]))
    if how == 'nan in the last step':
        trainer.stop_trigger = chainer.training.get_trigger((N_STEPS + 1, 'iteration'))
    trainer.run()


@pytest.mark.parametrize(
    'how, message',
    [
        ('raise', 'rank 1 of 2 on .* has failed, all ranks end: ZeroDivisionError: '),
        ('killed', 'rank 1 .*[Kk]illed'),
        ('nan', 'FloatingPointError: the loss of rank 1 is not finite, noticed after step 4[1-9]'),
        ('nan in the last step', 'the loss of rank 1 is not finite, noticed after step 41'),
    ],
)
def test_a_rank_that_fails_ends_all(how, message):
    start = time.monotonic()
    error = on_ranks(2, fail, how, status=None).stderr
    assert time.monotonic() - start < SECONDS
    assert re.search(message, ' '.join(error.split()))
