"""Functions that a user's loss calls, noted in the first step, before anything is tried out."""

import functools
import gc
import subprocess
import sys
import types
import weakref

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer

from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.calls import are_noted, called, is_noting, noting

from tests.support.processes import ROOT
from tests.support.training import HOST, is_captured, make_model, make_updater, molecules
from tests.training import host_graphs


class Chosen(chainer.Link):
    """Link that chooses its loss by name; `made` has weak references to objects of its steps."""

    def __init__(self):
        super().__init__()
        self.made = []
        with self.init_scope():
            self.w = chainer.Parameter(numpy.array(2.0, 'f'))

    def forward(self):
        step = Step()
        self.made.append(weakref.ref(step))
        return getattr(self, 'loss_' + step.kind())()

    def loss_of_squares(self):
        return self.w * self.w

    def loss_of_others(self):
        return self.w


class Step:
    def kind(self):
        return 'of_squares'


def step(link):
    optimizer = chainer.optimizers.SGD(0.1).setup(link)
    with noting(link):
        optimizer.update(link)


def test_functions_that_a_loss_calls():
    """They are found among objects that are frozen, as those of this file are."""
    assert gc.get_freeze_count()
    link = Chosen()
    step(link)
    names = {each.__name__ for each in called(link) if isinstance(each, types.FunctionType)}
    assert names == {'forward', 'kind', 'loss_of_squares'}


def scaled(factor):
    """Return a decorator; all its functions have one code."""

    def decorate(function):
        @functools.wraps(function)
        def inner(*args):
            return function(*args) * factor

        return inner

    return decorate


@scaled(2)
def doubled(x):
    return x


def test_all_functions_of_a_decorator_are_found():
    tripled = scaled(3)(doubled)

    def loss(link):
        return tripled(link.w)

    link = Chosen()
    optimizer = chainer.optimizers.SGD(0.1).setup(link)
    with noting(link):
        optimizer.update(loss, link)
    found = set(map(id, called(link)))
    assert {id(loss), id(tripled), id(doubled), id(doubled.__wrapped__)} <= found


def test_objects_whose_methods_are_called():
    """Noted calls keep no object alive that the step has made."""
    link = Chosen()
    step(link)
    assert [each for each in called(link) if not isinstance(each, types.FunctionType)] == [link]
    assert [made() for made in link.made] == [None]


def test_a_model_of_a_library_has_no_functions_of_a_user():
    """Methods of the package's named tuples are in no library's module, and must be left out."""
    model = make_model()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    with noting(model):
        optimizer.update(model, *chainer_bspmm.concat_mols(molecules(4)))
    assert called(model) == []


FIRST_STEP_OF_A_PROCESS = """
import chainer_bspmm, chainer
from chainer_bspmm.training.calls import called, noting
from tests.support.training import make_model, molecules
model = make_model()
model.to_device('@cupy:0')
model.device.use()
optimizer = chainer.optimizers.SGD(0.1).setup(model)
with noting(model):
    optimizer.update(model, *chainer_bspmm.concat_mols(molecules(4), model.device))
print(called(model))
"""


@pytest.mark.gpu
def test_cupy_has_no_functions_of_a_user():
    """Only in the first step of a process does CuPy load libraries, and call other packages."""
    command = [sys.executable, '-W', 'ignore', '-c', FIRST_STEP_OF_A_PROCESS]
    printed = subprocess.run(
        command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ).stdout
    assert printed.splitlines()[-1] == '[]'


def test_functions_of_another_module_with_equal_code_are_left_out():
    """Two functions have equal code if a file is loaded twice."""
    modules: list[dict] = [{'__name__': 'a_script_of_a_user'} for _ in range(2)]
    for module in modules:
        exec(compile('def loss(link): return link.w * link.w', 'a_script.py', 'exec'), module)
    first, second = (module['loss'] for module in modules)
    assert first.__code__ == second.__code__
    link = Chosen()
    optimizer = chainer.optimizers.SGD(0.1).setup(link)
    with noting(link):
        optimizer.update(second, link)
    assert second in called(link) and first not in called(link)


def test_what_the_collection_of_garbage_calls_is_left_out():
    calls = []

    def callback(phase, info):
        calls.append(phase)

    def loss(link):
        gc.collect()
        return link.w * link.w

    gc.callbacks.append(callback)
    try:
        link = Chosen()
        optimizer = chainer.optimizers.SGD(0.1).setup(link)
        with noting(link):
            optimizer.update(loss, link)
    finally:
        gc.callbacks.remove(callback)
    assert calls and loss in called(link) and callback not in called(link)


def test_nothing_else_is_called_by_the_loss():
    """Hooks of an optimizer run in the same step, but the loss does not call them."""

    def hook(optimizer):
        assert is_noting()
        calls.append(optimizer)

    calls = []
    link = Chosen()
    optimizer = chainer.optimizers.SGD(0.1).setup(link)
    optimizer.add_hook(hook)
    with noting(link):
        optimizer.update(link)
    assert len(calls) == 1 and hook not in called(link)
    assert not is_noting()


def test_a_profiler_that_is_at_work():
    link = Chosen()

    def profile(frame, event, argument):
        pass

    sys.setprofile(profile)
    try:
        step(link)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert are_noted(link) and called(link) == []


def test_a_loss_that_raises():
    link = Chosen()
    link.loss_of_squares = None
    with pytest.raises(TypeError, match="^'NoneType' object is not callable$"):
        step(link)
    assert sys.getprofile() is None and not is_noting()


@pytest.mark.parametrize('is_of_user', [False, True])
def test_only_a_user_s_loss_begins_with_a_step_that_is_not_tried_out(monkeypatch, is_of_user):
    host_graphs.stand_in(monkeypatch)
    model = make_model()
    loss = (lambda *arguments: model(*arguments)) if is_of_user else None
    updater = make_updater(GraphUpdater, HOST, model, loss_func=loss)
    updater.update()
    assert (updater._driver.session is None) == is_of_user == are_noted(model)
    updater.update()
    updater.update()
    assert is_captured(updater)
