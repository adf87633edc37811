"""`noting`: note a user's functions as a loss calls them, in a step of the training itself.

`Reach` finds functions by the names in code. It cannot find a function that is chosen at run time,
as by ``getattr(self, 'loss_' + name)``, so it also follows the functions that were called.
"""

import contextlib
import gc
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import chainer

from chainer_bspmm.training.kinds import is_of_user

# Link that is trained -> weak references to the functions that were called, and to the objects
# whose methods were called. References to objects that the step itself made are dead after it.
_called: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# The function of `importlib` that calls the finders of modules.
SEARCH = sys.modules['_frozen_importlib']._find_spec.__code__
_noting = threading.local()  # it has an attribute in threads that are inside of `noting`


def are_noted(target: chainer.Link) -> bool:
    """Return whether calls were noted in a step of a target."""
    return target in _called


def called(target: chainer.Link) -> list[Any]:
    """Return the functions and objects that were noted for a target, and still exist."""
    found = [reference() for reference in _called.get(target, ())]
    return [each for each in found if each is not None]


def is_noting() -> bool:
    """Return whether this thread is inside of :func:`noting`."""
    return bool(vars(_noting))


def run_loss(function: Callable, arguments: tuple) -> Any:
    """Call a loss; :func:`noting` recognizes this function."""
    return function(*arguments)


@contextlib.contextmanager
def noting(target: chainer.Link) -> Iterator[None]:
    """Context of a step in which the calls of its loss are noted.

    The loss is the first function that `run_loss` or an optimizer's ``update`` calls. Nothing is
    noted while a profiler is active, because the profiler would miss the step.
    """
    _called[target] = []
    _noting.target = target
    notes = _Notes()
    if sys.getprofile() is None:
        sys.setprofile(notes.note)
    try:
        yield
    finally:
        del _noting.target
        if sys.getprofile() == notes.note:
            sys.setprofile(None)
        _called[target] = notes.found()


class _Notes:
    """Code objects of the functions that were called, and the objects whose methods they are."""

    def __init__(self):
        # The first function that one of these calls is the loss.
        callers = run_loss, inspect.unwrap(chainer.GradientMethod.update)
        self._callers = {function.__code__ for function in callers}
        # Python calls these when it collects garbage, which may happen in the loss by chance.
        self._callbacks = {getattr(each, '__code__', None) for each in gc.callbacks}
        self._loss: Any = None  # the frame of the loss while it runs
        # The frame in which Python searches for a module, while it does. Finders belong to tools
        # such as virtual environments, and are called only where something is imported.
        self._search: Any = None
        # (code, id of the globals that it ran with) -> whether it is a user's. Equal code with
        # other globals belongs to another module, such as an earlier import of the same file.
        self._codes: dict[tuple[types.CodeType, int], bool] = {}
        # The globals by their id. They are kept, so that no other dict gets the same id.
        self._globals: dict[int, dict] = {}
        self._owners: dict[int, weakref.ref] = {}

    def note(self, frame, event, argument):
        """Note a call; a function for ``sys.setprofile``."""
        if event == 'return' and frame is self._loss:
            sys.setprofile(None)
            self._loss = None
        if event == 'return' and frame is self._search:
            self._search = None
        code = frame.f_code
        if event != 'call' or self._search is not None:
            return
        if code is SEARCH:
            self._search = frame
        if self._loss is None:
            if frame.f_back is None or frame.f_back.f_code not in self._callers:
                return
            self._loss = frame
        key = code, id(frame.f_globals)
        if key not in self._codes:
            is_called = code not in self._callbacks
            self._codes[key] = is_called and is_of_user(frame.f_globals.get('__name__'))
            self._globals[id(frame.f_globals)] = frame.f_globals
        if self._codes[key] and code.co_argcount:
            # Some classes allow no weak references, and a metaclass may raise anything.
            with contextlib.suppress(Exception):
                self._note_owner(frame.f_locals.get(code.co_varnames[0]))

    def _note_owner(self, owner):
        kind = type(owner)
        if is_of_user(owner.__module__ if issubclass(kind, type) else kind.__module__):
            known = self._owners.get(id(owner))
            if known is None or known() is not owner:
                self._owners[id(owner)] = weakref.ref(owner)

    def found(self):
        """Return weak references to the functions and the objects."""
        codes = {code for (code, _), is_of_user in self._codes.items() if is_of_user}
        functions = [
            function
            for namespace in self._globals.values()
            for function in _named_functions(namespace)
            if self._is_called(function)
        ]
        left = codes - {function.__code__ for function in functions}
        others = self._referring(left) if left else []
        return [*map(weakref.ref, functions + others), *self._owners.values()]

    def _referring(self, codes):
        """Return the functions that were called and have one of these codes.

        A frame refers to its code, but not to its function. To look for functions takes as long as
        a collection of garbage.
        """
        has_frozen = gc.get_freeze_count() > 0
        if has_frozen:
            # The objects that a user has frozen are not searched. What was made since then gets
            # frozen, too.
            gc.unfreeze()
        try:
            referrers = gc.get_referrers(*codes)
        finally:
            if has_frozen:
                gc.freeze()
        return [
            each for each in referrers if type(each) is types.FunctionType and self._is_called(each)
        ]

    def _is_called(self, function):
        return self._codes.get((function.__code__, id(function.__globals__)), False)


def _named_functions(namespace):
    """Yield the functions of a module, and of its classes, that can have been made only once.

    A function within another one may have been made more than once, with other variables. So may
    the function of a decorator, which has the name of a function that it decorates.
    """
    read = type.__getattribute__  # no metaclass of a user's is asked
    for value in list(namespace.values()):
        is_class = issubclass(type(value), type)
        if is_class and read(value, '__module__') == namespace.get('__name__'):
            values = list(read(value, '__dict__').values())
        else:
            values = [value]
        for each in values:
            if type(each) in (staticmethod, classmethod):
                each = each.__func__
            if type(each) is types.FunctionType and '<locals>' not in each.__qualname__:
                if not each.__code__.co_freevars:
                    yield each
