"""Repairs of Chainer, each tested by Chainer's code that needs it."""

import inspect
import re
import sys
import types
import warnings

from chainer_bspmm.compat import import_hooks  # repairs Chainer before anything imports it
import chainer
from chainer import distributions, functions, links, optimizers, serializers
from chainer.backends import cuda
import numpy
import pytest

from tests.support.processes import python


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        yield


def test_gradient_of_as_strided():
    x = chainer.Variable(numpy.arange(4, dtype='f'))
    y = functions.as_strided(x, (3, 2), (1, 1), 0)
    y.grad = numpy.ones((3, 2), 'f')
    y.backward()
    numpy.testing.assert_array_equal(x.grad, [1, 2, 2, 1])


def test_as_strided_refuses_integer_gradients_as_before():
    from chainer.functions.array import as_strided

    floats = vars(as_strided)['np'].sctypes['float']  # NumPy 2 lacks this
    assert numpy.dtype('f') in floats and numpy.dtype('i') not in floats


@pytest.mark.parametrize(
    'mode, align_corners, expected',
    [
        ('bilinear', True, [[0, 1, 2], [2, 3, 4], [4, 5, 6]]),
        ('nearest', False, [[0, 0, 2], [0, 0, 2], [4, 4, 6]]),
    ],
)
def test_resize_images(mode, align_corners, expected):
    x = chainer.Variable(numpy.array([[[[0, 2], [4, 6]]]], 'f'))
    y = functions.resize_images(x, (3, 3), mode=mode, align_corners=align_corners)
    numpy.testing.assert_array_equal(y.array[0, 0], expected)
    y.grad = numpy.ones_like(y.array)
    y.backward()
    assert x.grad.sum() == 9


@pytest.mark.parametrize('as_input', [chainer.Variable, numpy.array])
def test_log_probability_of_categories(as_input):
    p = numpy.array([[0.25, 0.75], [0.5, 0.5]], 'f')
    found = distributions.Categorical(p).log_prob(as_input(numpy.array([1, 0], 'i')))
    numpy.testing.assert_allclose(found.array, numpy.log([0.75, 0.5]), rtol=1e-6)


def test_padding_without_warning():
    from chainer_chemistry.dataset.converters import concat_mols

    small = numpy.ones((1, 2, 2), 'f')
    large = numpy.full((1, 3, 1), 2, 'f')
    adj, label = concat_mols([(small, numpy.int32(1)), (large, numpy.int32(2))], device=-1)
    expected = [[[1, 1], [1, 1], [0, 0]], [[2, 0], [2, 0], [2, 0]]]
    numpy.testing.assert_array_equal(adj[:, 0], expected)
    assert adj.dtype == numpy.float32
    numpy.testing.assert_array_equal(label, [1, 2])


def test_padding_refuses_arrays_of_different_dimension():
    examples = [(numpy.ones((1, 2)),), (numpy.ones(2),), (numpy.ones((3, 1, 1)),)]
    shapes = re.escape('[(1, 2), (2,), (3, 1, 1)]')
    message = '^padding: expected arrays of equal ndim, got shapes %s$' % shapes
    with pytest.raises(ValueError, match=message):
        chainer.dataset.concat_examples(examples, padding=0)


class _UnusedLayer(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.used = links.Linear(2, 1)
            self.unused = links.Linear(None, 1, nobias=True)


def _train_one_step(optimizer):
    model = _UnusedLayer()
    optimizer.setup(model)
    optimizer.update(lambda: functions.sum(model.used(numpy.ones((1, 2), 'f'))))
    return model


@pytest.mark.parametrize('is_enabled', [True, False])
def test_optimizer_resumes_without_state_of_unused_parameters(tmp_path, is_enabled):
    optimizer = optimizers.Adam()
    _train_one_step(optimizer)
    serializers.save_npz(str(tmp_path / 'adam.npz'), optimizer)
    resumed = optimizers.Adam().setup(_UnusedLayer())
    resumed.target.unused.W.update_rule.enabled = is_enabled
    serializers.load_npz(str(tmp_path / 'adam.npz'), resumed)
    numpy.testing.assert_array_equal(
        resumed.target.used.W.update_rule.state['m'], optimizer.target.used.W.update_rule.state['m']
    )
    assert resumed.target.unused.W.update_rule.enabled == is_enabled


def test_optimizer_still_refuses_the_snapshot_of_another_kind(tmp_path):
    optimizer = optimizers.SGD()
    _train_one_step(optimizer)
    serializers.save_npz(str(tmp_path / 'sgd.npz'), optimizer)
    resumed = optimizers.Adam().setup(_UnusedLayer())
    with pytest.raises(KeyError):
        serializers.load_npz(str(tmp_path / 'sgd.npz'), resumed)
    assert resumed.target.unused.W.update_rule.enabled


def test_environment_check_on_macos(monkeypatch):
    monkeypatch.setattr(sys, 'platform', 'darwin')
    chainer._environment_check.check()


@pytest.mark.parametrize('cupy_major, warned', [(14, False), (13, True)])
def test_cudnn_warning_only_where_cudnn_can_be_installed(monkeypatch, cupy_major, warned):
    cuda = chainer.backends.cuda
    monkeypatch.setattr(cuda, 'available', True)
    monkeypatch.setattr(cuda, 'cudnn_enabled', False)
    monkeypatch.setattr(cuda, '_cudnn_disabled_by_user', False, raising=False)
    monkeypatch.setattr(cuda, '_cupy_major', cupy_major)
    monkeypatch.setattr(cuda.check_cuda_available, '_already_warned', False, raising=False)
    import_hooks.repair(cuda)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        cuda.check_cuda_available()
    assert any('cuDNN is not enabled' in str(w.message) for w in caught) == warned


@pytest.mark.parametrize(
    'period, unit', [(1, 'epoch'), (0.3, 'epoch'), (2, 'epoch'), (3, 'iteration')]
)
@pytest.mark.parametrize('every', [1, 2])
def test_triggers_fire_as_before(tmp_path, period, unit, every):
    """The repaired trigger agrees with Chainer's own, also after loading old and new snapshots.

    A trigger that another one guards is not asked after every step.
    """
    from chainer.training.triggers import IntervalTrigger

    own, theirs = IntervalTrigger(period, unit), IntervalTrigger(period, unit)
    iterator = chainer.iterators.SerialIterator(list(range(20)), 3)
    optimizer = optimizers.SGD().setup(links.Linear(1, 1))
    updater = chainer.training.updaters.StandardUpdater(iterator, optimizer)
    trainer = types.SimpleNamespace(updater=updater)
    fired = []
    for step in range(1, 60):
        iterator.next()
        updater.iteration = step
        if step % every:
            continue
        if step == 20:
            serializers.save_npz(tmp_path / 'own.npz', own)
            own = IntervalTrigger(period, unit)
            serializers.load_npz(tmp_path / 'own.npz', own)
        if step == 40:
            for trigger in (own, theirs):  # state from a snapshot of an early Chainer
                trigger._previous_iteration, trigger._previous_epoch_detail = -1, -1.0
        fired.append(own(trainer))
        assert fired[-1] == inspect.unwrap(IntervalTrigger.__call__)(theirs, trainer)
        assert vars(own) == vars(theirs)
    assert any(fired) and (every > 1 or not all(fired))


def test_triggers_of_an_updater_without_epochs():
    from chainer.training.triggers import IntervalTrigger

    trigger = IntervalTrigger(2, 'iteration')
    updater = types.SimpleNamespace(iteration=0)
    for updater.iteration in (1, 2, 3):
        fires = trigger(types.SimpleNamespace(updater=updater))
        assert fires == (updater.iteration == 2)


def test_a_gpu_without_cupy_says_what_to_do():
    code = (
        "import sys; sys.modules['cupy'] = None; import chainer_bspmm, chainer\n"
        'try:\n'
        '    chainer.get_device(0)\n'
        'except RuntimeError as error:\n'
        '    print(error)'
    )
    *_, last = python('-c', code).stdout.splitlines()
    assert last == (
        '(see https://github.com/chainer/chainer#installation).import of cupy halted; None in '
        'sys.modules. A GPU needs CuPy; `python -m chainer_bspmm info` says how to install it. '
        'Without a GPU the device is -1'
    )


def patched():
    """Yield functions of Chainer and Chainer Chemistry that are patched, and their names there."""
    from chainer.training.extensions import Evaluator
    from chainer.training.triggers import IntervalTrigger
    from chainer.training.updaters import StandardUpdater
    from chainer_chemistry.dataset.graph_dataset.base_graph_dataset import BaseGraphDataset
    from chainer_chemistry.models import prediction, RSGCN
    from chainer_chemistry.models.prediction.base import BaseForwardModel

    for owner, *names in (
        (StandardUpdater, '__init__', 'update'),
        (Evaluator, '__call__', 'initialize'),
        (chainer.GradientMethod, 'update'),
        (chainer.Optimizer, 'serialize'),
        (IntervalTrigger, '__call__'),
        (chainer.reporter.Summary, 'add', 'compute_mean'),
        (chainer.reporter.DictSummary, 'add'),
        (cuda, 'check_cuda_available'),
        (BaseForwardModel, '_forward'),
        (prediction, 'set_up_predictor'),
        (BaseGraphDataset, '__init__'),
        (RSGCN, '__call__'),
    ):
        for name in names:
            yield vars(owner)[name], name


@pytest.mark.parametrize('function, name', list(patched()))
def test_a_patched_function_looks_like_the_original(function, name):
    """`help` shows it, and tracebacks and pickles name it, as before."""
    original = inspect.unwrap(function)
    assert function is not original
    assert function.__name__ == name
    assert function.__module__ == original.__module__ and 'bspmm' not in function.__module__
    assert function.__doc__ == original.__doc__
    assert inspect.signature(function) == inspect.signature(original)
