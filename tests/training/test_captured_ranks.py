"""Captured steps of several ranks: a collective a step, and the results of one large batch."""

import copy
import re

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import optimizer_hooks, optimizers
from chainer.backend import CpuDevice

from chainer_bspmm.multi_node import faults, optimizer as multi_node
from chainer_bspmm.training import graph_updater, GraphUpdater
from chainer_bspmm.training.program import Program
from tests.support import relative_error
from tests.support.training import hidden, molecules, make_model, without_dropout
from tests.training import host_graphs
from tests.training.host_graphs import eager_causes, read_at_capture

RATE = 1e-5
LARGEST_NORM = 1.0
# Sizes of this rank's batches. Forms come again, so they are captured, replayed and checked.
SIZES = [4, 4, 4, 7, 4, 7, 7, 2, 4, 2, 2, 4, 7] * 2


class Others:
    """A communicator of rank 0 of 2. The other rank has two molecules in every step.

    sums: number of elements of every collective; reason: text that says why the other rank cannot
    capture, or None; is_bad: whether the loss of the other rank is not finite.
    """

    rank, size, allreduce_grad_dtype = 0, 2, None

    def __init__(self, model):
        self.mpi_comm = self.nccl_comm = self
        self._model = model
        self.sums = []
        self.told = []
        self.reason = None
        self.is_bad = False
        self.is_one_host = False

    def allgather(self, mine):
        self.told.append(mine)
        # Ranks compare their states and checksums, which are equal here. Then they tell each other
        # why they cannot capture, and whether they have statistics of all ranks.
        return [mine, self.reason if len(self.told) == 3 else mine]

    def batch(self):
        """Return the molecules of the next step."""
        return molecules(2, seed=100 + len(self.sums))

    def allReduce(self, sent, received):
        assert len(self.told) == 4  # else this rank might wait for ever
        copied = copy.deepcopy(self._model)
        copied.cleargrads()
        reporter = chainer.Reporter()  # the other rank has its own
        reporter.add_observer('main', copied)
        with reporter:
            loss_of(copied, self.batch()).backward()
        received[...] = sent
        start = 0
        for _, param in sorted(copied.namedparams()):
            received[start : start + param.size] += 2 * param.grad.ravel()
            start += param.size
        received[start:] += 2, 0, self.is_bad
        self.sums.append(len(sent))


def loss_of(model, examples):
    return model(*chainer_bspmm.concat_mols(examples))


class Batches(chainer.dataset.Iterator):
    """Batches of this rank, whose sizes a test puts into `sizes`."""

    dataset = ()
    is_new_epoch, epoch, epoch_detail = False, 0, 0.0

    def __init__(self):
        self.sizes = []
        self.given = []
        self.is_over = False

    def finalize(self):
        self.is_over = True

    def __next__(self):
        self.given.append(molecules(self.sizes.pop(0), seed=len(self.given)))
        return self.given[-1]

    next = __next__


@pytest.fixture
def device():
    return CpuDevice()


@pytest.fixture
def made(monkeypatch, device, graphs):
    """Function that makes an updater of rank 0, and the other rank."""
    from chainermn.optimizers import _MultiNodeOptimizer

    kind = type('MultiNodeOptimizer', (multi_node.Weighted, _MultiNodeOptimizer), {})
    monkeypatch.setattr(faults, 'PATIENCE', 0)

    def of(loss_func=None, hooks=(), **kwargs):
        model = without_dropout(make_model())
        loss_of(model, molecules(3))  # makes its parameters
        comm = Others(model)
        host_graphs.with_ranks(monkeypatch, comm)
        optimizer = kind(optimizers.SGD(RATE).setup(model), comm, True)
        for hook in hooks:
            optimizer.add_hook(hook)
        kwargs = {'seed': 7, 'on_difference': 'raise', **kwargs}
        if loss_func is not None:
            kwargs['loss_func'] = lambda *args: loss_func(model, *args)
        return GraphUpdater(Batches(), optimizer, device=device, **kwargs), comm

    return of


def train(updater, sizes):
    """Update with batches of these sizes; return the warnings that say why steps are eager."""
    updater.get_iterator('main').sizes = list(sizes)
    reporter = chainer.Reporter()
    reporter.add_observer('main', updater._driver.optimizer.target)
    with eager_causes() as causes, reporter.scope({}):
        for _ in sizes:
            updater.update()
    return causes


@pytest.mark.parametrize('is_one_host', (False, True))
@pytest.mark.parametrize('is_clipped', (False, True))
def test_ranks_are_one_large_batch(made, graphs, noted, is_clipped, is_one_host):
    """Every step, whether run, captured, replayed or checked, is one collective of one size."""
    hooks = [optimizer_hooks.GradientClipping(LARGEST_NORM)] * is_clipped
    updater, comm = made(hooks=hooks)
    comm.is_one_host = is_one_host
    tried = noted(Program, 'capture_alone')
    alone = chainer.optimizers.SGD(RATE).setup(copy.deepcopy(updater._driver.optimizer.target))
    for hook in hooks:
        alone.add_hook(hook)
    assert train(updater, SIZES) == []
    assert comm.told[2:] == [None, False] and len(tried) == 1
    assert len(comm.sums) == len(SIZES) and len(set(comm.sums)) == 1
    assert graphs[0].n_compiled == 1
    n_replays = [program._n_replays for program in updater._driver.programs.values()]
    assert max(n_replays) > 3 and sum(map(bool, n_replays)) > 2 and 0 in n_replays, n_replays
    assert graphs[0].n_launches == sum(n_replays) * (1 if is_one_host else 2)
    comm.sums.clear()
    norms = []
    for batch in updater.get_iterator('main').given:
        alone.update(loss_of, alone.target, batch + comm.batch())
        norms.append(sum(float((p.grad**2).sum()) for p in alone.target.params()) ** 0.5)
        comm.sums.append(0)
    assert (min(norms) > LARGEST_NORM * 1.001) == (not is_clipped), norms
    for (path, param), (_, expected) in zip(
        sorted(updater._driver.optimizer.target.namedparams()), sorted(alone.target.namedparams())
    ):
        assert relative_error(param.array, expected.array) < 1e-5, path


def test_a_rank_does_not_check_its_first_step_alone(made, noted):
    """The step may contain a sum over all ranks, in which the others would not take part."""
    checks = noted(graph_updater, 'check_first_step')
    updater, _ = made()
    assert train(updater, SIZES[:3]) == [] and not checks


@pytest.mark.parametrize('step', (0, 1, 9))
def test_loss_of_another_rank_is_not_finite(made, step):
    """Parameters stay the same, and the next step raises: run, captured or replayed."""
    updater, comm = made()
    train(updater, SIZES[:1] * step)
    comm.is_bad = True
    before = [param.array.copy() for param in updater._driver.optimizer.target.params()]
    train(updater, SIZES[:1])
    for param, array in zip(updater._driver.optimizer.target.params(), before):
        numpy.testing.assert_array_equal(param.array, array)
    n_before = len(updater._driver.programs)
    # After a change of the optimizer programs are forgotten, but not the bad loss.
    updater._driver.forget()
    assert n_before and not updater._driver.programs
    message = '^the loss of rank 1 is not finite, noticed after step %d$' % (step + 1)
    with pytest.raises(FloatingPointError, match=message):
        train(updater, SIZES[:1])
    assert len(comm.sums) == step + 1


@pytest.mark.parametrize('end', ('snapshot', 'finalize'))
def test_loss_of_the_last_step_is_not_finite(made, end):
    updater, comm = made()
    train(updater, SIZES[:3])
    comm.is_bad = True
    train(updater, SIZES[:1])
    assert not comm.n_waits
    message = '^the loss of rank 1 is not finite, noticed after step 4$'
    with pytest.raises(FloatingPointError, match=message):
        if end == 'finalize':
            updater.finalize()
        else:
            updater.serialize(chainer.serializers.DictionarySerializer())
    assert comm.n_waits == 1  # it waits for the last step
    assert updater.get_iterator('main').is_over == (end == 'finalize')


def test_replay_that_differs(made):
    """The state after the replay stays, because the other ranks have replayed as well."""
    factor = hidden(1.0)  # its value is not watched
    read = read_at_capture(lambda: factor.value)
    updater, comm = made(lambda model, *args: model(*args) * read())
    train(updater, [4] * 12)
    model = updater._driver.optimizer.target
    factor.value = 1.5
    message = (
        'rank 0 cannot continue with captured steps, as the other ranks do: a replay of the '
        'captured step differs from an eager one in gradient (relative difference 3.3e-01): it '
        'reads something from Python that has changed since it was captured, and that is not '
        'watched (docs/captured_training.md)'
    )
    with pytest.raises(RuntimeError, match='^%s$' % re.escape(message)):
        for _ in range(20):
            replayed, n = copy.deepcopy(model), len(comm.sums)
            train(updater, [4])
    assert len(comm.sums) == n + 1
    batch = updater.get_iterator('main').given[-1]
    comm.sums.pop()
    replayed.cleargrads()
    (loss_of(replayed, batch) * (4 / 6) + loss_of(replayed, comm.batch()) * (2 / 6)).backward()
    pairs = zip(sorted(model.namedparams()), sorted(replayed.namedparams()))
    for (path, param), (_, before) in pairs:
        expected = before.array - RATE * before.grad
        assert relative_error(param.array, expected) < 1e-5, path


@pytest.mark.parametrize('is_one_host', (False, True))
def test_a_view_of_a_parameter_is_reported_as_before_the_update(made, is_one_host):
    """The eager step that a replay is compared with ends before the update."""

    def loss_func(model, *args):
        _, last = max(model.namedparams())
        chainer.report({'first': last.array.ravel()[:1].reshape(())}, model)
        return model(*args)

    updater, comm = made(loss_func)
    comm.is_one_host = is_one_host
    assert train(updater, [4] * 6) == []


def test_parameters_of_another_size_in_another_session(made):
    """The memory that the ranks share has no room for larger parameters."""
    updater, comm = made()
    comm.is_one_host = True
    train(updater, [4, 4])
    optimizer = updater._driver.optimizer
    table = optimizer.target.predictor.graph_conv.embed.W
    table.array = numpy.concatenate([table.array, table.array])
    optimizer.add_hook(optimizer_hooks.WeightDecay(0.1))
    message = (
        '^rank 0 cannot continue with captured steps, as the other ranks do: parameters have other '
        'sizes or dtypes than in the first step$'
    )
    with pytest.raises(RuntimeError, match=message):
        train(updater, [4])


def test_a_converter_is_called_once_a_step(made):
    """The first step makes parameters beforehand, and must not call the converter for that."""
    n_molecules = []

    def converter(batch, device=None):
        n_molecules.append(len(batch))
        return chainer_bspmm.concat_mols(batch, device)

    updater, comm = made(converter=converter)
    sizes = [4, 4, 7, 4, 7]
    assert not train(updater, sizes)
    assert n_molecules == sizes


def test_layout_that_cannot_be_captured_later(made):
    def loss_func(model, *args):
        loss = model(*args)
        if args[1].n_graphs == 7:
            chainer.report({'n': 'seven'}, model)
        return loss

    updater, comm = made(loss_func)
    train(updater, [4, 4, 4])
    message = (
        '^rank 0 cannot continue with captured steps, as the other ranks do: main/n is reported '
        'as a value on the host, which a replay would repeat$'
    )
    with pytest.raises(RuntimeError, match=message):
        train(updater, [7])


@pytest.mark.parametrize('rank', (0, 1))
def test_all_train_eagerly_if_one_has_to(made, monkeypatch, rank):
    def loss_func(model, *args):
        loss = model(*args)
        if rank == 0:
            chainer.report({'n': 'seven'}, model)
        return loss

    updates = []
    monkeypatch.setattr(multi_node.Weighted, 'update', lambda self, *args: updates.append(args))
    updater, comm = made(loss_func)
    comm.reason = 'a reason' if rank else None
    (cause,) = train(updater, [4, 4, 7])
    assert ('value on the host' if rank == 0 else 'a reason') in cause
    assert '(rank %d)' % rank in cause
    assert len(updates) == 3 and not comm.sums and len(comm.told) == 3


def test_communicators_without_nccl_train_eagerly(made, monkeypatch):
    updates = []
    monkeypatch.setattr(multi_node.Weighted, 'update', lambda self, *args: updates.append(args))
    updater, comm = made()
    updater._driver.together = None
    monkeypatch.setattr(host_graphs.communicators, 'is_nccl', lambda comm: False)
    iterator, optimizer = updater.get_iterator('main'), updater.get_optimizer('main')
    again = GraphUpdater(iterator, optimizer, device=CpuDevice())
    (cause,) = train(again, [4, 4])
    assert 'MultiNodeOptimizer' in cause and len(updates) == 2 and not comm.told


def test_no_optimizer_is_the_main_one():
    with pytest.raises(ValueError, match="optimizer: expected one named 'main', got gen, dis"):
        GraphUpdater(Batches(), {name: optimizers.SGD() for name in ('gen', 'dis')})
