"""Unusual scripts train by the two lines as in Chainer's own loop, or an error says why not.

Each script of tests/training/unusual_scripts runs twice, each time in a new module: first without
checks and captured steps, and then as for a user. Parameters, reported values and the script's
own counters have to be equal, and have the same bits on a host without captured steps.
"""

import contextlib
import functools
import importlib.util
import itertools
import pathlib
import re
import sys
import threading
import types
import warnings
import weakref
from typing import Any, NamedTuple

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer

from tests.training import host_graphs, user_state
from tests.training.unusual_scripts import counters, kept, libraries, practices, weights
from tests.training.unusual_scripts.bench import Bench, Script

FOLDER = pathlib.Path(__file__).parent / 'unusual_scripts'
FILES = {
    'counters': counters,
    'weights': weights,
    'practices': practices,
    'libraries': libraries,
    'kept': kept,
}
ROUNDING = 1e-4  # relative to the norm of an array, or to a number, in captured steps

_numbers = itertools.count()


class Outcome(NamedTuple):
    """Result of a run of a script: `state` is its return value; `error` is a text, or empty."""

    parameters: dict[str, numpy.ndarray]
    reports: list[dict[str, float]]
    state: Any
    error: str
    warned: list[str]


@contextlib.contextmanager
def user_module(file: str):
    """Load a file of scripts as a user's module, which is new and has its own globals."""
    name = 'script_of_a_user_%d' % next(_numbers)
    spec = importlib.util.spec_from_file_location(name, FOLDER / (file + '.py'))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def as_given(by_two_lines: bool):
    """Configure training by the two lines, or Chainer's own loop without any check."""
    configured = vars(chainer.global_config)
    checks = [name for name in configured if name.startswith('bspmm_check')]
    assert checks
    with contextlib.ExitStack() as stack:
        for name in ('bspmm_capture', *checks):
            stack.enter_context(chainer.using_config(name, by_two_lines))
        yield


def run(file, name, device, by_two_lines, reached=None) -> Outcome:
    """Run a script; meanwhile the list ``reached`` holds its module and its models."""
    state, error = None, ''
    reached = [] if reached is None else reached
    with (
        user_module(file) as module,
        as_given(by_two_lines),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter('always')
        bench = Bench(chainer.get_device(device))
        reached[:] = [module, bench.models]
        try:
            state = module.SCRIPTS[name].run(bench)
        except Exception as raised:
            error = '%s: %s' % (type(raised).__name__, raised)
    reached.clear()
    texts = [str(warning.message) for warning in caught]
    return Outcome(bench.parameters(), bench.reports, state, error, texts)


def differences(actual: Outcome, expected: Outcome, rounding: float) -> list[str]:
    """Return sentences that say how a run differs from that of Chainer's loop."""
    found = []
    if actual.error != expected.error:
        found.append('the error is %r, not %r' % (actual.error, expected.error))
    if len(actual.reports) != len(expected.reports):
        found.append('%d reports, not %d' % (len(actual.reports), len(expected.reports)))
    for i, (own, other) in enumerate(zip(actual.reports, expected.reports)):
        if not are_equal(own, other, rounding):
            found.append('report %d is %s, not %s' % (i, own, other))
            break
    if not actual.error and not are_equal(actual.state, expected.state, rounding):
        found.append('the state is %s, not %s' % (actual.state, expected.state))
    if actual.parameters.keys() != expected.parameters.keys():
        others = actual.parameters.keys() ^ expected.parameters.keys()
        return [*found, 'parameters are there once only: %s' % sorted(others)]
    for path, value in expected.parameters.items():
        error = numpy.linalg.norm(actual.parameters[path] - value)
        if not error <= rounding * numpy.linalg.norm(value):
            found.append('%s is off by %.2g' % (path, error / (numpy.linalg.norm(value) or 1)))
    return found


def are_equal(actual, expected, rounding) -> bool:
    """Compare dicts, lists and plain values, of which only floats may differ, by rounding."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            are_equal(actual[name], expected[name], rounding) for name in expected
        )
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(
            are_equal(own, other, rounding) for own, other in zip(actual, expected)
        )
    if isinstance(expected, float):
        return abs(actual - expected) <= rounding * abs(expected) or (
            actual != actual and expected != expected
        )
    return actual == expected


def judge(script: Script, actual: Outcome, expected: Outcome, rounding: float) -> None:
    found = differences(actual, expected, rounding)
    text = '\n'.join([*found, 'warned:', *actual.warned])
    if actual.error != expected.error:
        assert script.refused is not None and re.search(script.refused, actual.error), text
    elif script.outside is not None:
        remarks = [re.search(script.outside, text) for text in actual.warned]
        assert not found or not script.outside or any(remarks), text
    else:
        assert not found, text


def everything():
    for file, module in FILES.items():
        for name, script in module.SCRIPTS.items():
            marks = () if script.quick else pytest.mark.slow
            yield pytest.param(file, name, id='%s: %s' % (file, name), marks=marks)


@functools.lru_cache
def of_chainer(file, name, device) -> Outcome:
    """Run a script without checks and captures, once for all tests on one kind of device."""
    expected = run(file, name, device, by_two_lines=False)
    assert not expected.error, expected.error
    assert expected.reports and all(map(is_finite, expected.parameters.values()))
    return expected


def is_finite(array):
    return numpy.isfinite(array).all()


def compare(file, name, device, rounding, reached=None):
    expected = of_chainer(file, name, device)
    script = FILES[file].SCRIPTS[name]
    actual = run(file, name, device, by_two_lines=True, reached=reached)
    judge(script, actual, expected, rounding)
    if rounding and script.told:  # steps are captured
        assert any(re.search(script.told, text) for text in actual.warned), actual.warned


@pytest.fixture
def captured(monkeypatch):
    """Stand in for graphs; return a list of all capturers, and a list for the reached objects."""
    made = host_graphs.stand_in(monkeypatch)
    reached: list = []
    user_state.freeze_launches(monkeypatch, host_graphs.HostCapturer, reached)
    return made, reached


@pytest.mark.parametrize('file, name', [*everything()])
def test_on_a_host(file, name):
    compare(file, name, '@numpy', rounding=0)


@pytest.mark.parametrize('file, name', [*everything()])
def test_captured_by_stand_ins(file, name, captured, monkeypatch):
    """Like a graph, a stand-in's launch reads the values that Python held at its capture."""
    made, reached = captured
    script = FILES[file].SCRIPTS[name]
    if script.fused:
        host_graphs.fuse(monkeypatch)
    compare(file, name, '@numpy', ROUNDING, reached)
    if script.n_captures is not None:
        assert sum(capturer.n_captures for capturer in made) == script.n_captures


def test_stand_ins_are_launched(captured):
    """Tests with stand-ins prove nothing unless a script's step is captured and launched."""
    made, reached = captured
    compare('weights', 'an_attribute', '@numpy', ROUNDING, reached)
    assert sum(capturer.n_launches for capturer in made) > 20


def test_stand_ins_read_what_was_captured():
    owner = types.SimpleNamespace(n=1, inner={'counts': [1, itertools.count(3)]})
    state = user_state.State([owner])
    owner.n, owner.inner['counts'][0] = 2, 2
    owner.inner['new'] = next(owner.inner['counts'][1])
    with state.put_for_a_while():
        assert owner.n == owner.inner['counts'][0] == 1 and 'new' not in owner.inner
        assert next(owner.inner['counts'][1]) == 3
    assert owner.n == owner.inner['counts'][0] == 2 and owner.inner['new'] == 3
    assert next(owner.inner['counts'][1]) == 4


class Warm:
    weight = 1.0


class Full(Warm):
    pass


def test_stand_ins_read_the_class_and_the_dict_of_the_capture():
    stage: Any = types.SimpleNamespace(inner=Warm())
    attributes = vars(stage.inner)
    state = user_state.State([stage])
    stage.inner.__class__ = Full
    stage.inner.__dict__ = {'weight': 2.0}
    with state.put_for_a_while():
        assert type(stage.inner) is Warm and vars(stage.inner) is attributes
    assert type(stage.inner) is Full and stage.inner.weight == 2


def test_stand_ins_read_the_arrays_of_variables_of_the_capture():
    scale = chainer.Variable(numpy.ones(2, 'f'))
    param: Any = chainer.Parameter(numpy.ones(2, 'f'))
    param.decay = 0.1
    array = scale.array
    state = user_state.State([scale, param])
    scale.array = numpy.zeros(2, 'f')
    param.decay = 0.2
    with state.put_for_a_while():
        assert scale.array is array and param.decay == 0.1
    assert not scale.array.any() and param.decay == 0.2


def test_stand_ins_read_objects_of_libraries_as_captured():
    task = Warm()
    weights = weakref.WeakKeyDictionary({task: 1.0})
    event = threading.Event()
    settings = functools.cache(types.SimpleNamespace)
    settings().weight = 1.0
    keys = {Warm(): 1}
    state = user_state.State([weights, event, settings, keys])
    weights[task] = settings().weight = next(iter(keys)).weight = 2.0
    event.set()
    with state.put_for_a_while():
        assert weights[task] == settings().weight == next(iter(keys)).weight == 1.0
        assert not event.is_set()
    assert weights[task] == settings().weight == next(iter(keys)).weight == 2.0
    assert event.is_set()


@pytest.mark.gpu
@pytest.mark.parametrize('file, name', [*everything()])
def test_captured_on_a_gpu(file, name):
    compare(file, name, '@cupy:0', ROUNDING)


def test_there_are_enough():
    assert sum(len(module.SCRIPTS) for module in FILES.values()) >= 200
    assert 10 <= sum(s.quick for m in FILES.values() for s in m.SCRIPTS.values()) <= 25
