"""What a training step reads from Python, which a captured graph would go on using as it was."""

import functools
import operator
import sys
import types

import numpy

import chainer
from chainer.backends import cuda

# Whose functions are taken to depend on their arguments, and on Chainer's configuration.
LIBRARIES = frozenset(('chainer', 'chainer_chemistry', 'chainer_bspmm', 'cupy', 'numpy', 'scipy'))
# What is not looked into: another one in its place is no change. Each step makes such a variable.
PASSED_BY = chainer.Variable, dict, list
PLAIN = (bool, int, float, complex, str, bytes, type, numpy.generic, numpy.dtype)


class Frozen:
    """Give a key that changes when something frozen has changed.

    Covers the attributes of all links that are numbers, strings, tuples of them, functions or
    arrays, those of their classes, such variables around these functions, methods and the one that
    is run, and the attributes by which these use objects and modules around them, all parameters'
    arrays, whether they want a gradient and are updated, the optimizer's states, and Chainer's
    configuration. It does not look into lists and dicts of a link, nor into other objects that it
    has.

    Args:
        target (chainer.Link): what is trained, or predicts.
        function (callable): what is run, a link or a function that uses some.

    Attributes:
        links (list of chainer.Link): the target's, and others that the function uses.
        params (list of tuple): the target's parameters, each with its update rule or None.
        other_params (list of chainer.Parameter): those of the other links, such as of a part of a
            model that is not trained.
    """

    def __init__(self, target, function):
        self._target = target
        self._function = function
        self._look()

    def key(self):
        """Return a hashable that equals an earlier one if nothing has changed since that.

        Things stand in it by their ``id``: whoever keeps a key keeps :meth:`held`, too, or another
        thing could take the number of one that is gone.
        """
        if any(watched.has_changed() for watched in self._watched):
            self._look()
        self._arrays = [
            part
            for param, rule in self.params
            for part in (param._data[0], *((rule and rule.state) or {}).values())
        ]
        self._arrays += [param._data[0] for param in self.other_params]
        flags = [(param.requires_grad, rule and rule.enabled) for param, rule in self.params]
        flags += [param.requires_grad for param in self.other_params]
        return self._key, tuple(map(id, self._arrays)), tuple(flags)

    def held(self):
        """Return the things (list) that the last key names by their ``id``."""
        return self._arrays + [thing for watched in self._watched for thing in watched.held]

    def changed(self, old, new):
        """Return what (str) differs between two keys."""
        names = {id(watched.owner): watched.name for watched in self._watched}
        for before, now in zip(old[0], new[0]):
            for one, other in zip(before[1:], now[1:]):
                if one != other:
                    return 'the attribute %s of %s' % (other[0], names[now[0]])
        for before, now, what in zip(old[1:], new[1:], ("a parameter's array", 'what is frozen')):
            if before != now:
                return what
        return 'the layout of the batches'

    def onlooker(self):
        """Return what (str or None) wants to see every call: debug mode, a hook."""
        if chainer.is_debug():
            return 'Chainer is in debug mode'
        names = [*chainer.get_function_hooks(), *chainer._get_link_hooks()]
        for link in self.links:
            names += link._local_link_hooks or ()
        return 'the hook %s is there, which wants to see every call' % names[0] if names else None

    def _look(self):
        links, functions, classes = {}, {}, {}
        _follow(self._target, links, functions, classes)
        _follow(self._function, links, functions, classes)
        self.links = list(links.values())
        self._watched = [_Watched(chainer.config, 'chainer.config', _configuration)]
        for link in self.links:
            self._watched.append(
                _Watched(link, link.name or type(link).__name__, functools.partial(vars, link))
            )
        for kind in classes.values():
            self._watched.append(_Watched(kind, kind.__name__, functools.partial(vars, kind)))
        for function, owner in functions.values():
            self._watched.append(
                _Watched(
                    function, function.__name__, functools.partial(_surroundings, function, owner)
                )
            )
        self.params = [(param, param.update_rule) for param in self._target.params()]
        known = {id(param) for param, _ in self.params}
        self.other_params = [
            param
            for param in {
                id(param): param for link in self.links for param in link.params()
            }.values()
            if id(param) not in known
        ]
        self._key = tuple(watched.key for watched in self._watched)


class _Watched:
    """Named values of one owner, as they are now, and whether one was replaced since."""

    def __init__(self, owner, name, read):
        self.owner, self.name, self._read = owner, name, read
        found = read()
        self._values = list(found.values())
        tokens = [(name, value, _token(value)) for name, value in found.items()]
        self.key = (id(owner),) + tuple(
            (name, token) for name, _, token in tokens if token is not None
        )
        self.held = [owner] + [value for _, value, token in tokens if token is not None]

    def has_changed(self):
        values = list(self._read().values())
        if len(values) != len(self._values):
            return True
        if not all(map(operator.is_, values, self._values)):
            for value, before in zip(values, self._values):
                if value is not before and (
                    type(value) is not type(before) or type(value) not in PASSED_BY
                ):
                    return True
            self._values = values
        return False


def _follow(thing, *found):
    """Note the links, functions and classes that something consists of or uses.

    Args:
        found (dicts): links and classes of links, id -> itself; functions, (id, id of the object
            whose method it is) -> itself and that object, which is no link, or None.
    """
    links, functions, classes = found
    if isinstance(thing, functools.partial):
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            _follow(part, *found)
    elif isinstance(thing, types.MethodType):
        _follow(thing.__self__, *found)
        _follow_function(thing.__func__, thing.__self__, *found)
    elif isinstance(thing, chainer.Link):
        new = [link for link in thing.links() if id(link) not in links]
        links.update((id(link), link) for link in new)
        for link in new:
            for value in vars(link).values():  # links that are no children, too
                _follow(value, *found)
            for kind in type(link).__mro__:
                if id(kind) not in classes and _is_user_s(kind):
                    classes[id(kind)] = kind
                    for value in vars(kind).values():
                        _follow(value, *found)
    elif isinstance(thing, types.FunctionType):
        _follow_function(thing, None, *found)
    elif isinstance(thing, property):
        _follow(thing.fget, *found)
    elif isinstance(thing, (staticmethod, classmethod)):
        _follow(thing.__func__, *found)
    elif callable(thing) and not isinstance(thing, type):
        _follow_function(type(thing).__call__, thing, *found)


def _follow_function(function, owner, links, functions, classes):
    """Follow what a function, or the method of an object, reads."""
    if (
        not isinstance(function, types.FunctionType)
        or not _is_user_s(function)
        or (function.__name__ == '__init__')
    ):
        return
    owner = owner if _is_open(owner) else None
    if (id(function), id(owner)) in functions:
        return
    functions[id(function), id(owner)] = function, owner
    for value in list(_surroundings(function, owner).values()):
        _follow(value, links, functions, classes)
    if owner is not None:
        for name in _names(function.__code__):
            _follow_function(getattr(type(owner), name, None), owner, links, functions, classes)


def _is_user_s(thing):
    """Say whether a class, function or module is from outside of libraries, and Python's own."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return _package(name) not in (LIBRARIES | sys.stdlib_module_names)


def _package(module):
    return (module or '').split('.')[0]


def _is_open(thing):
    """Say whether something has attributes that a user may change: an object, or a module."""
    if isinstance(thing, types.ModuleType):
        return _is_user_s(thing)
    return (
        hasattr(thing, '__dict__')
        and not isinstance(thing, (chainer.Link, type, types.FunctionType))
        and _package(type(thing).__module__) not in LIBRARIES
    )


def _surroundings(function, owner=None):
    """Return name -> value of the variables around a function that it reads.

    And of such objects' and modules' attributes that have a name which it asks for; so of `owner`,
    the object whose method it is.
    """
    code, around = function.__code__, function.__globals__
    names = _names(code)
    found = {name: around[name] for name in names if name in around}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # nothing there yet
            found[name] = None
    # Links and numbers come in by defaults, too: lambda atoms, adj, link=link: ...
    arguments = reversed(code.co_varnames[: code.co_argcount])
    found.update(zip(arguments, reversed(function.__defaults__ or ())))
    found.update(function.__kwdefaults__ or {})
    objects = [(name, value) for name, value in found.items() if _is_open(value)]
    for prefix, thing in objects if owner is None else [('self', owner), *objects]:
        attributes = vars(thing)
        found.update(
            ('%s.%s' % (prefix, name), attributes[name]) for name in names if name in attributes
        )
    return found


@functools.lru_cache(maxsize=1024)
def _names(code):
    """Return the names (dict, in order) that code asks for, functions within it included."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_names(constant))
    return names


def _configuration():
    return {**vars(chainer.global_config), **vars(chainer.config._local)}


def _token(value):
    """Return what stands for a value in a key: None for one that is not looked at."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)  # NaN equals itself, True is not 1
    if isinstance(value, tuple):
        return tuple(map(_token, value))
    if isinstance(value, (numpy.ndarray, cuda.ndarray)) or (
        callable(value) and not isinstance(value, chainer.Link)
    ):
        return id(value)
    return None
