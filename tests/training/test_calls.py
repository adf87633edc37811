"""Functions that a user's loss calls, noted in the first step, before anything is tried out."""

import copy
import contextlib
import functools
import gc
import importlib
import subprocess
import sys
import types
import weakref

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer

from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.calls import _Notes, are_noted, called, is_noting, noting, run_loss

from tests.support.processes import ROOT
from tests.support.training import HOST, is_captured, make_model, make_updater, molecules
from tests.training import host_graphs


@pytest.fixture(autouse=True)
def frozen():
    """Freeze all objects: a test that ran before may have unfrozen them, as the examples do."""
    gc.freeze()


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

    def scaled(self, x):
        y = 2 * x
        return y

    @classmethod
    def squared(cls, x):
        return x * x


def step(link, *loss):
    """Take a noted step with a link as its own loss, or with a function of the link."""
    optimizer = chainer.optimizers.SGD(0.1).setup(link)
    with noting(link):
        optimizer.update(*loss, link)


def test_functions_that_a_loss_calls():
    """They are found among objects that are frozen."""
    link = Chosen()
    step(link)
    names = [each.__name__ for each in called(link) if isinstance(each, types.FunctionType)]
    assert sorted(names) == ['forward', 'kind', 'loss_of_squares']


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
    step(link, loss)
    found = set(map(id, called(link)))
    assert {id(loss), id(tripled), id(doubled), id(doubled.__wrapped__)} <= found


def make_square():
    def square(x):
        return x * x

    return square


def test_a_function_with_the_code_of_a_global_one(monkeypatch):
    first, second = make_square(), make_square()
    monkeypatch.setitem(globals(), 'square', first)

    def loss(link):
        return second(first(link.w))

    link = Chosen()
    step(link, loss)
    assert first in called(link) and second in called(link)


def test_a_loss_that_an_update_of_the_package_calls():
    def loss(link):
        return link.w

    link = Chosen()
    with noting(link):
        run_loss(loss, (link,))
    assert loss in called(link)


def test_objects_whose_methods_are_called():
    """Noted calls keep no object alive that the step has made."""
    link = Chosen()
    step(link)
    assert [each for each in called(link) if not isinstance(each, types.FunctionType)] == [link]
    assert [made() for made in link.made] == [None]


def test_owners_of_methods_with_more_arguments():
    thing = Step()

    def loss(link):
        return thing.scaled(Step.squared(link.w))

    link = Chosen()
    step(link, loss)
    assert thing in called(link) and Step in called(link)


def test_objects_that_are_no_owners():
    """A library's object is passed to a user's function, and a user's object to a library's."""
    thing = Step()

    def squared(x):
        return x * x

    def loss(link):
        copy.copy(thing)
        return squared(link.w)

    link = Chosen()
    step(link, loss)
    assert squared in called(link)
    assert not any(each is thing or each is link.w for each in called(link))


def test_an_object_in_the_place_of_one_that_is_gone():
    """The later one has the same id, and whether Python reuses one is its own choice."""
    notes = _Notes()
    gone = weakref.ref(Step())
    later = Step()
    notes._owners[id(later)] = gone
    notes._note_owner(later)
    assert gone() is None and [each() for each in notes.found()] == [later]


def test_a_module_in_the_place_of_one_that_is_gone():
    """The later one would have the same id if the earlier one's variables were not kept."""
    code = compile('def square(x): return x * x', 'a_script.py', 'exec')
    variables: dict = {}

    def loss(link):
        nonlocal variables
        for name in ('numpy', 'a_script_of_a_user'):
            variables.clear()  # otherwise its function refers to it
            variables = {'__name__': name}
            exec(code, variables)
            variables['square'](link.w)
        return link.w

    link = Chosen()
    step(link, loss)
    assert variables['square'] in called(link)


def test_a_class_that_does_not_tell_its_module():
    class Silent(type):
        def __getattribute__(cls, name):
            if name == '__module__':
                raise RuntimeError('no module')
            return super().__getattribute__(name)

    class Thing(metaclass=Silent):
        def squared(self, x):
            return x * x

    thing = Thing()

    def loss(link):
        return thing.squared(link.w)

    link = Chosen()
    step(link, loss)
    assert loss in called(link) and thing not in called(link)


def test_frozen_objects_stay_alone_if_all_functions_have_names():
    n_frozen = gc.get_freeze_count()
    step(Chosen())
    assert 0 < gc.get_freeze_count() <= n_frozen


@pytest.mark.parametrize('is_frozen', [True, False])
def test_a_search_for_a_function_that_is_gone_freezes_nothing_new(is_frozen):
    """Frozen objects are searched, and are frozen again."""

    def loss(link):
        return (lambda: link.w)()

    if not is_frozen:
        gc.unfreeze()
    try:
        link = Chosen()
        step(link, loss)
        assert (gc.get_freeze_count() > 0) == is_frozen
        assert loss in called(link)
    finally:
        gc.freeze()


def test_a_frozen_function_with_the_code_of_one_that_is_not():
    def make():
        def square(w):
            return w * w

        return square

    frozen = make()
    gc.freeze()
    other = make()

    def loss(link):
        return frozen(link.w) + other(link.w)

    link = Chosen()
    step(link, loss)
    assert {frozen, other} <= {*called(link)}


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
    step(link, second)
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
        step(link, loss)
    finally:
        gc.callbacks.remove(callback)
    assert calls and loss in called(link) and callback not in called(link)


def test_what_a_search_for_a_module_calls_is_left_out(monkeypatch):
    """Virtual environments and other tools have finders, which are called by any import."""

    class Finder:
        n_calls = 0

        def find_spec(self, *words):
            type(self).n_calls += 1
            self.after()

        def after(self):
            pass

    def loss(link):
        with contextlib.suppress(ImportError):
            importlib.import_module('a_module_that_nobody_has')
        return squares(link)

    def squares(link):
        return link.w * link.w

    finder = Finder()
    monkeypatch.setattr(sys, 'meta_path', [*sys.meta_path, finder])
    link = Chosen()
    step(link, loss)
    found = called(link)
    assert Finder.n_calls and loss in found and squares in found
    assert not {finder, Finder.find_spec, Finder.after} & {*found}


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


def test_a_step_that_calls_no_loss():
    link = Chosen()
    with noting(link):
        pass
    assert sys.getprofile() is None and called(link) == []


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
