"""Ranks train like one process of Chainer with the molecules of all ranks."""

import itertools
import json
import os
import re
import types

from chainer_bspmm.training import GraphUpdater  # repairs Chainer before anything imports it
import chainer
import numpy
import pytest
from chainer import functions
from chainer.backends import cuda
from chainer.training import StandardUpdater

from chainer_bspmm.multi_node import faults, optimizer, start
from chainer_bspmm.multi_node.optimizer import _mean_on_host, n_molecules
from tests.multi_node.models import arrays_of, CASES, communicator, CONVERTERS, Disagreement
from tests.multi_node.models import my_share, N_ALL, N_STEPS, optimizer_of
from tests.multi_node.models import parameters_of_every_model, raise_now, regressor
from tests.support import assert_close_arrays, relative_error
from tests.support.ranks import needs_mpi, on_kept_ranks
from tests.support.training import molecules
from tests.training import host_graphs

N_CAPTURED = 16  # steps
CAPTURED_SIZES = (7, 5)  # molecules of a step on each rank
CAPTURED = 'RSGCN', 'RSGCN, batch norm', 'norm of head'


def train_every_model(path):
    comm = communicator()
    found = parameters_of_every_model(comm)
    if comm.rank == 0:
        numpy.savez(path, **found)


@needs_mpi
@pytest.mark.parametrize('n_ranks', [pytest.param(n, marks=pytest.mark.slow) for n in (1, 3)] + [2])
def test_ranks_are_one_large_batch(tmp_path, n_ranks):
    on_kept_ranks(n_ranks, train_every_model, tmp_path / 'of ranks.npz')
    alone = parameters_of_every_model(None)
    for name, layout in CASES:
        for step in (0, N_STEPS - 1):
            prefix = '%s, %s, %d ' % (name, layout, step)
            assert sum(key.startswith(prefix) for key in alone) > 3
    with numpy.load(tmp_path / 'of ranks.npz') as found:
        assert_close_arrays(found, alone)


def trained_with(kind, name, comm=None, sizes=None):
    """Train; return the updater."""
    examples = my_share(molecules(4 * N_ALL), comm, sizes)
    # Ranks begin with different parameters, and all have to take the parameters of rank 0.
    model = regressor(name, comm.rank if comm else 0, comm if 'norm' in name else None)
    optimizer = optimizer_of(model, comm, chainer.optimizers.SGD(1e-4))
    iterator = chainer.iterators.SerialIterator(examples, len(examples) // 4, shuffle=False)
    updater = kind(iterator, optimizer, converter=CONVERTERS['packed'], device='@numpy')
    for _ in range(N_CAPTURED):
        updater.update()
    return updater


def train_captured(folder):
    for name in CAPTURED:
        for are_of_one_host in (False, True):
            model = train_with_graphs(name, are_of_one_host)
            file = '%s, %s, %d.npz' % (name, are_of_one_host, communicator().rank)
            numpy.savez(os.path.join(folder, file), **arrays_of(model))


def train_with_graphs(name, are_of_one_host):
    comm = communicator()
    sent = []

    def all_reduce(mine, received):
        sent.append(len(mine))
        comm.mpi_comm.Allreduce(mine, received)

    comm.nccl_comm = types.SimpleNamespace(allReduce=all_reduce)
    comm.allreduce_grad_dtype = None
    comm.is_one_host = are_of_one_host
    with pytest.MonkeyPatch.context() as monkeypatch:
        graphs = host_graphs.stand_in(monkeypatch)
        host_graphs.with_ranks(monkeypatch, comm)
        updater = trained_with(GraphUpdater, name, comm, CAPTURED_SIZES)
    assert len(graphs) == 1
    if 'norm' in name and not are_of_one_host:  # sums over several hosts make steps eager
        assert not sent and not graphs[0].n_launches
    else:
        assert len(sent) == N_CAPTURED and graphs[0].n_launches > N_CAPTURED / 2
    return updater.get_optimizer('main').target


@needs_mpi
def test_captured_ranks_are_one_large_batch(tmp_path):
    on_kept_ranks(2, train_captured, tmp_path)
    for name in CAPTURED:
        expected = arrays_of(trained_with(StandardUpdater, name).get_optimizer('main').target)
        for rest in itertools.product((False, True), range(2)):
            with numpy.load(tmp_path / ('%s, %s, %d.npz' % (name, *rest))) as found:
                assert_close_arrays(found, expected)


def unequal_batches(path):
    comm = communicator()
    found = parameters_of_unequal_batches(comm)
    # Parameters are the same on all ranks, although they were different at first.
    bits = b''.join(numpy.asarray(found[key]).tobytes() for key in sorted(found))
    assert len(set(comm.mpi_comm.allgather(bits))) == 1
    if comm.rank == 0:
        numpy.savez(path, **found)


def parameters_of_unequal_batches(comm):
    arrays = {}
    examples = molecules(N_ALL)
    for name, sizes in (
        ('RSGCN', [1, 9, 2]),
        ('RSGCN', [8, 0, 4]),
        ('RSGCN, batch norm', [1, 9, 2]),
        ('norm of head', [1, 9, 2]),
    ):
        model = regressor(name, comm.rank if comm else 0, comm if 'norm' in name else None)
        optimizer = optimizer_of(model, comm, chainer.optimizers.SGD(1e-3))
        optimizer.remove_hook('GradientClipping')  # it would hide a wrong factor
        mine = my_share(examples, comm, sizes)
        for _ in range(2):
            if mine:
                optimizer.update(model, *CONVERTERS['packed'](mine))
            else:
                optimizer.join()
        for key, value in arrays_of(model).items():
            arrays['%s, %s %s' % (name, sizes, key)] = value
    return arrays


@needs_mpi
def test_every_molecule_counts_alike(tmp_path):
    on_kept_ranks(3, unequal_batches, tmp_path / 'of ranks.npz')
    alone = parameters_of_unequal_batches(None)
    assert len(alone) > 20
    with numpy.load(tmp_path / 'of ranks.npz') as found:
        assert_close_arrays(found, alone)


def join_with_statistics():
    """A rank without a batch cannot join, because it would miss the sums of statistics."""
    comm = communicator()
    model = regressor('norm of head', 0, comm)
    optimizer = optimizer_of(model, comm)
    batch = CONVERTERS['packed'](molecules(4))
    optimizer.update(model, *batch)
    message = (
        "^join: expected a batch, because the link '/predictor/norm' normalises over the batches "
        'of all ranks$'
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.join()


@needs_mpi
def test_a_rank_without_a_batch_where_statistics_are_of_all():
    on_kept_ranks(2, join_with_statistics)


@pytest.mark.parametrize('share, expected', [(0.25, [1, 2]), (0.5, [2, 4]), (1, [4, 8])])
def test_gradients_have_their_share_before_their_mean_is_taken(monkeypatch, share, expected):
    """Gradients get their weight first, and then ChainerMN's communicator takes their mean."""
    model = chainer.Link()
    with model.init_scope():
        model.W = chainer.Parameter(numpy.zeros(2, 'f'))
    model.W.grad = numpy.array([2, 4], 'f')
    found = []
    comm = types.SimpleNamespace(
        size=2, multi_node_mean_grad=lambda link, zero_fill: found.append(link.W.grad.tolist())
    )
    monkeypatch.setattr(optimizer, '_is_naive', lambda comm: False)
    of_rank = types.SimpleNamespace(communicator=comm, target=model)
    optimizer.Weighted._mean(of_rank, share, zero_fill=False)
    assert found == [expected]


@pytest.mark.parametrize('is_naive', [True, False])
@pytest.mark.parametrize('xps', [[numpy], [numpy, 'cupy'], ['cupy']], ids=str)
def test_gradients_of_one_dtype_are_one_message_if_naive_finds_all_on_the_host(
    monkeypatch, is_naive, xps
):
    params = {
        str(i): types.SimpleNamespace(grad=1, device=types.SimpleNamespace(xp=xp))
        for i, xp in enumerate(xps)
    }
    target = types.SimpleNamespace(namedparams=lambda include_uninit: params.items())
    taken = []
    comm = types.SimpleNamespace(
        size=2, multi_node_mean_grad=lambda link, zero_fill: taken.append("Chainer's")
    )
    monkeypatch.setattr(optimizer, '_is_naive', lambda comm: is_naive)
    monkeypatch.setattr(optimizer, '_mean_on_host', lambda *_: taken.append('ours'))
    of_rank = types.SimpleNamespace(communicator=comm, target=target)
    optimizer.Weighted._mean(of_rank, 0.5, zero_fill=False)
    assert taken == ['ours' if is_naive and xps == [numpy] else "Chainer's"]


def test_naive_with_a_model_on_a_gpu(monkeypatch):
    device = types.SimpleNamespace(xp=cuda.cupy, name='@cupy:0')
    target = types.SimpleNamespace(params=lambda: [types.SimpleNamespace(device=device)])
    monkeypatch.setattr(optimizer, '_is_naive', lambda comm: comm == 'naive')
    monkeypatch.setattr(optimizer.communicators, 'knows_gpus', lambda: False)
    message = (
        "communicator: 'naive' sends arrays of the host, the model is on @cupy:0; "
        "use create_communicator('pure_nccl')"
    )
    with pytest.raises(RuntimeError, match='^%s$' % re.escape(message)):
        optimizer._check_device('naive', target)
    optimizer._check_device('pure_nccl', target)


def test_number_of_molecules():
    atoms, adj, labels = CONVERTERS['folded'](molecules(5))
    assert n_molecules([atoms, adj, labels]) == n_molecules([adj]) == 5
    assert n_molecules([numpy.zeros((4, 9)), numpy.zeros((4, 9, 9))]) == 4  # dense batch
    assert n_molecules([]) == n_molecules(['no array']) == 1
    assert n_molecules([numpy.zeros((7, 4)), numpy.zeros(4)]) == 1  # another batch axis


class OfRank:
    """A user's hook, which differs between ranks."""

    name = 'OfRank'

    def __init__(self, rank):
        self.path = 'log of %d' % rank

    def __call__(self, optimizer):
        pass


def begin_with_given_gradients():
    """The first call updates nothing, because the ranks have different states until then."""
    comm = communicator()
    model = chainer.links.Linear(3, 2)
    optimizer = optimizer_of(model, comm)
    if comm.rank:
        optimizer.join()
    else:
        model.cleargrads()
        functions.sum(model(numpy.ones((1, 3), 'f'))).backward()
        optimizer.update()
    assert optimizer.t == 0
    weights = comm.mpi_comm.allgather(model.W.array)
    numpy.testing.assert_array_equal(*weights)
    functions.sum(model(numpy.ones((1, 3), 'f'))).backward()
    optimizer.update()
    assert optimizer.t == 1 and (model.W.array != weights[0]).all()


@needs_mpi
def test_given_gradients_in_the_first_step():
    on_kept_ranks(2, begin_with_given_gradients)


def begin(case):
    begin_with(communicator(), case)


def begin_with(comm, case):
    examples = molecules(4)
    # GIN has parameters that the first batch makes.
    name = 'GIN' if case in ('lazy', 'made on one', 'joined') else 'RSGCN'
    if case == 'models':
        name = ('RSGCN', 'NFP')[comm.rank]
    model = regressor(name, 0 if case == 'states' else comm.rank)
    kind = chainer.optimizers.Adam
    if case == 'optimizers' and comm.rank:
        kind = chainer.optimizers.SGD
    optimizer = optimizer_of(model, comm, kind())
    decays = case == 'decays' and comm.rank
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3 if decays else 1e-4))
    if case == 'hooks' and comm.rank:
        optimizer.remove_hook('WeightDecay')
    if case == 'rates' and comm.rank:
        optimizer.alpha = 0.5
    if case == 'own rates' and comm.rank:
        model.predictor.embed.W.update_rule.hyperparam.alpha = 0.5
    if case == 'frozen' and comm.rank:
        model.predictor.embed.W.update_rule.enabled = False
    if case == 'order of hooks' and comm.rank:
        optimizer.remove_hook('GradientClipping')
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1))
    if case == 'of a rank':  # must not be refused
        optimizer.add_hook(OfRank(comm.rank))
    if case == 'updates' and comm.rank:
        optimizer.actual_optimizer.t = 3
    if case == 'states':  # like snapshots of other runs
        start.make_states(model)
        model.predictor.embed.W.update_rule.state['m'][...] = comm.rank
    batch = CONVERTERS['packed'](examples)
    if case == 'made on one':
        if comm.rank:
            with chainer.using_config('train', False):
                model(*batch)
    if case == 'nan' and comm.rank:
        optimizer.update(model, *batch[:2], batch[2] * numpy.nan)
    if case == 'joined':  # rank 0 joins while its model has no parameters
        optimizer.update(model, *batch) if comm.rank else optimizer.join()
    optimizer.update(model, *batch)
    if case == 'another model':
        model = regressor(name, 7 + comm.rank)
        optimizer.setup(model)
        optimizer.update(model, *batch)
    if case == 'no zeros':
        object.__setattr__(optimizer, 'zero_fill', False)
        loss = model if comm.rank else lambda atoms, adj, t: functions.sum(model.predictor.embed.W)
        optimizer.update(loss, *batch)
    if case == 'no batch':  # one rank has no gradients either
        object.__setattr__(optimizer, 'zero_fill', False)
        optimizer.join() if comm.rank else optimizer.update(model, *batch)
    if case == 'grown':
        with model.init_scope():
            model.more = chainer.links.Linear(3, 2)
        optimizer.setup(model)
        optimizer.update(model, *batch)
        optimizer.update(model, *batch)
    found = comm.mpi_comm.allgather(arrays_of(model))
    for key, value in found[0].items():
        numpy.testing.assert_array_equal(found[1][key], value, key)
    assert optimizer.t > 0


@needs_mpi
@pytest.mark.parametrize(
    'case',
    ['lazy', 'made on one', 'joined', 'grown', 'another model', 'no batch', 'of a rank', 'states'],
)
def test_ranks_begin_alike(case):
    on_kept_ranks(2, begin, case)


def make_lazy_parameters():
    """Check the modes of the loss: first a trial in test mode makes the parameters."""
    model = chainer.links.Linear(None, 2)
    modes = []

    def loss(x):
        modes.append((chainer.config.train, chainer.config.enable_backprop))
        return functions.sum(model(x))

    optimizer_of(model, communicator()).update(loss, numpy.ones((1, 3), 'f'))
    assert modes == [(False, False), (True, True)]


@needs_mpi
def test_parameters_are_made_in_test_mode():
    """In training mode, batch normalisation would count the batch twice, and dropout would draw."""
    on_kept_ranks(2, make_lazy_parameters)


def report_the_mode():
    model = chainer.links.Linear(None, 2)

    def loss(x):
        chainer.report({'training' if chainer.config.train else 'trial': 1})
        return functions.sum(model(x))

    optimizer = optimizer_of(model, communicator())
    reporter = chainer.Reporter()
    with reporter:
        optimizer.update(loss, numpy.ones((1, 3), 'f'))
    assert list(reporter.observation) == ['training']


@needs_mpi
def test_a_trial_that_makes_parameters_reports_nothing():
    on_kept_ranks(2, report_the_mode)


def mean_of_halves():
    """Average float16 in float32: not every MPI adds float16, and half of 2**-24 would be 0."""
    param = chainer.Parameter(numpy.zeros(2, 'e'))
    param.grad = numpy.array([1, 2**-24], 'e')
    _mean_on_host(communicator(), [param], 0.5)
    assert param.grad.dtype == 'e' and param.grad.tolist() == [1, 2**-24]


@needs_mpi
def test_gradients_of_float16():
    on_kept_ranks(2, mean_of_halves)


DISAGREEMENTS = {
    'models': 'model: expected the same on all ranks, parameter '
    "'/predictor/gconvs/0/graph_linear/W' is on rank 0 only",
    'optimizers': 'optimizer: class: expected the same on all ranks, got '
    'chainer.optimizers.adam.Adam on rank 0 and chainer.optimizers.sgd.SGD on rank 1',
    'rates': 'optimizer: alpha: expected the same on all ranks, got 0.001 on rank 0 and 0.5 on '
    'rank 1',
    'own rates': "optimizer: alpha of parameter '/predictor/embed/W': expected the same on all "
    'ranks, got None on rank 0 and 0.5 on rank 1',
    'frozen': "optimizer: enabled of parameter '/predictor/embed/W': expected the same on all "
    'ranks, got True on rank 0 and False on rank 1',
    'hooks': "optimizer: list of hooks: expected the same on all ranks, got ['GradientClipping', "
    "'WeightDecay'] on rank 0 and ['GradientClipping'] on rank 1",
    'order of hooks': 'optimizer: list of hooks: expected the same on all ranks, got '
    "['GradientClipping', 'WeightDecay'] on rank 0 and ['WeightDecay', 'GradientClipping'] on "
    'rank 1',
    'decays': 'optimizer: rate of hook WeightDecay: expected the same on all ranks, got 0.0001 on '
    'rank 0 and 0.001 on rank 1',
    'updates': 'optimizer: expected the same number of updates on all ranks, got 0 on rank 0 and 3 '
    'on rank 1; load a snapshot on every rank',
    'nan': 'the loss of rank 1 is nan in step 1',
    'no zeros': 'zero_fill: expected True where ranks have gradients of different parameters, '
    'got False',
}


def disagree(path):
    """Run all cases on all ranks; a real error would end the ranks at the first case."""
    comm = communicator()
    told = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(faults, 'raise_on', raise_now)
        for case in DISAGREEMENTS:
            with pytest.raises(Disagreement) as caught:
                begin_with(comm, case)
            told[case] = caught.value.args
    with open(path % comm.rank, 'w') as file:
        json.dump(told, file)


@needs_mpi
def test_what_ranks_disagree_about(tmp_path):
    on_kept_ranks(2, disagree, str(tmp_path / '%d.json'))
    of_0, of_1 = (json.loads((tmp_path / ('%d.json' % rank)).read_text()) for rank in range(2))
    assert of_0 == of_1
    for case, message in DISAGREEMENTS.items():
        assert of_0[case] == [int(case == 'nan'), message], case


def test_a_parameter_of_two_shapes():
    one, other = (({'/a': ((n, 2), 'float32')}, {}, 0) for n in (4, 5))
    expected = (
        "model: expected the same on all ranks, parameter '/a' is float32 of shape (4, 2) on rank "
        '0 and float32 of shape (5, 2) on rank 3'
    )
    assert start._difference(one, other, 3) == expected


@pytest.mark.parametrize('has, rank', [(0, 0), (3, 3)])
def test_a_parameter_of_one_rank(has, rank):
    one = ({'/a': ((2,), 'float32')}, {}, 0)
    none = ({}, {}, 0)
    first, other = (one, none) if has == 0 else (none, one)
    expected = "model: expected the same on all ranks, parameter '/a' is on rank %d only" % rank
    assert start._difference(first, other, 3) == expected


NARROW, WIDE = ((2,), 'float32'), ((3,), 'float32')


@pytest.mark.parametrize(
    'one, two, message',
    [
        (
            ({'/a': NARROW}, {}, 0),
            ({'/a': WIDE}, {}, 0),
            "model: expected the same on all ranks, parameter '/a' is float32 of shape (2,) on "
            'rank 0 and float32 of shape (3,) on rank 3',
        ),
        (
            ({}, {'alpha': '0.1'}, 0),
            ({}, {'alpha': '0.2'}, 0),
            'optimizer: alpha: expected the same on all ranks, got 0.1 on rank 0 and 0.2 on rank 3',
        ),
        (
            ({}, {}, 4),
            ({}, {}, 7),
            'optimizer: expected the same number of updates on all ranks, got 4 on rank 0 and 7 '
            'on rank 3; load a snapshot on every rank',
        ),
    ],
    ids=['shape', 'setting', 'updates'],
)
def test_a_difference_is_found_on_whichever_rank_more_is(one, two, message):
    assert start._difference(one, two, 3) == message
    assert start._difference(two, one, 3) is not None
    assert start._difference(one, one, 3) is None


@pytest.mark.parametrize('has_first', [True, False])
def test_a_parameter_that_only_one_rank_has_made_is_no_difference(has_first):
    """It is sent to the others."""
    made = {'/a': NARROW}, {}, 0
    lazy = {'/a': None}, {}, 0
    first, other = (made, lazy) if has_first else (lazy, made)
    assert start._difference(first, other, 1) is None


@needs_mpi
@pytest.mark.parametrize('size, shape', [(3, (5, 3)), (3, (4, 3, 2, 5)), ((3, 2), (6, 3, 2))])
def test_batch_normalisation_of_one_rank(size, shape):
    from chainermn.links import MultiNodeBatchNormalization

    multi_node = MultiNodeBatchNormalization(size, communicator())
    results = []
    for link in (chainer.links.BatchNormalization(size), multi_node):
        rng = numpy.random.RandomState(0)
        x = chainer.Variable(rng.uniform(-1, 2, shape).astype('f'))
        y = [link(x), link(x, finetune=True), link(x, finetune=True)]
        with chainer.using_config('train', False):
            y.append(link(x))
        link.cleargrads()
        for part in y:
            part.grad = rng.uniform(-1, 1, shape).astype('f')
            part.backward()
        results.append([*[part.array for part in y], x.grad, link.gamma.grad, link.avg_var, link.N])
    for expected, found in zip(*results):
        assert relative_error(found, expected) < 1e-5


@needs_mpi
@pytest.mark.parametrize(
    'size, shape, message',
    [
        (3, (4, 7), 'x: expected shape (n, 3, ...), got (4, 7)'),
        (3, (4, 7, 2, 5), 'x: expected shape (n, 3, ...), got (4, 7, 2, 5)'),
        ((3, 2), (4, 7, 2), 'x: expected shape (n, 3, 2, ...), got (4, 7, 2)'),
    ],
)
def test_batch_normalisation_of_another_shape(size, shape, message):
    from chainermn.links import MultiNodeBatchNormalization

    link = MultiNodeBatchNormalization(size, communicator())
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        link(numpy.zeros(shape, 'f'))
