"""What a training step reads from Python, which a captured graph would go on using as it was."""
import functools
import operator
import types

import numpy

import chainer
from chainer.backends import cuda

# Whose functions are taken to depend on their arguments, and on Chainer's configuration.
LIBRARIES = 'chainer', 'chainer_chemistry', 'chainer_bspmm', 'cupy', 'numpy', 'scipy'
# What is not looked into: another one in its place is no change. Each step makes such a variable.
PASSED_BY = chainer.Variable, dict, list
PLAIN = (bool, int, float, complex, str, bytes, type, numpy.generic, numpy.dtype)


class Frozen:
    """Give a key that changes when something frozen has changed.

    Covers the attributes of all links that are numbers, strings, tuples of them, functions or
    arrays, such variables around these functions and the one that is run, all parameters' arrays,
    whether they want a gradient and are updated, the optimizer's states, and Chainer's
    configuration. It does not look into lists and dicts of a link, nor into objects that are no
    links.

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
        self._arrays = [part for param, rule in self.params
                        for part in (param._data[0], *((rule and rule.state) or {}).values())]
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
        for before, now, what in zip(old[1:], new[1:], (
                "a parameter's array", 'what is frozen')):
            if before != now:
                return what
        return 'the layout of the batches'

    def hooks(self):
        """Return what (str or None) wants to see every call: functions and links with hooks."""
        names = [*chainer.get_function_hooks(), *chainer._get_link_hooks()]
        for link in self.links:
            names += link._local_link_hooks or ()
        return names[0] if names else None

    def _look(self):
        links, functions = {}, {}
        _follow(self._target, links, functions)
        _follow(self._function, links, functions)
        self.links = list(links.values())
        self._watched = [_Watched(chainer.config, 'chainer.config', _configuration)]
        for link in self.links:
            self._watched.append(_Watched(
                link, link.name or type(link).__name__, functools.partial(vars, link)))
        for function in functions.values():
            self._watched.append(_Watched(
                function, function.__name__, functools.partial(_surroundings, function)))
        self.params = [(param, param.update_rule) for param in self._target.params()]
        known = {id(param) for param, _ in self.params}
        self.other_params = [
            param for param in {id(param): param for link in self.links
                                for param in link.params()}.values() if id(param) not in known]
        self._key = tuple(watched.key for watched in self._watched)


class _Watched:
    """Named values of one owner, as they are now, and whether one was replaced since."""

    def __init__(self, owner, name, read):
        self.owner, self.name, self._read = owner, name, read
        found = read()
        self._values = list(found.values())
        tokens = [(name, value, _token(value)) for name, value in found.items()]
        self.key = (id(owner),) + tuple(
            (name, token) for name, _, token in tokens if token is not None)
        self.held = [owner] + [value for _, value, token in tokens if token is not None]

    def has_changed(self):
        values = list(self._read().values())
        if len(values) != len(self._values):
            return True
        if not all(map(operator.is_, values, self._values)):
            for value, before in zip(values, self._values):
                if value is not before and (
                        type(value) is not type(before) or type(value) not in PASSED_BY):
                    return True
            self._values = values
        return False


def _follow(thing, links, functions):
    """Note (id -> itself) the links and functions that something consists of or uses."""
    if isinstance(thing, functools.partial):
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            _follow(part, links, functions)
    elif isinstance(thing, types.MethodType):
        _follow(thing.__self__, links, functions)
        _follow(thing.__func__, links, functions)
    elif isinstance(thing, chainer.Link) and id(thing) not in links:
        for link in thing.links():
            links[id(link)] = link
        for link in thing.links():
            for value in vars(link).values():
                if not isinstance(value, chainer.Link):
                    _follow(value, links, functions)
    elif isinstance(thing, types.FunctionType) and id(thing) not in functions and (
            (thing.__module__ or '').split('.')[0] not in LIBRARIES):
        functions[id(thing)] = thing
        for value in list(_surroundings(thing).values()):
            _follow(value, links, functions)


def _surroundings(function):
    """Return name -> value of the variables around a function that it reads."""
    code, around = function.__code__, function.__globals__
    found = {name: around[name] for name in code.co_names if name in around}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # nothing there yet
            found[name] = None
    return found


def _configuration():
    return {**vars(chainer.global_config), **vars(chainer.config._local)}


def _token(value):
    """Return what stands for a value in a key: None for one that is not looked at."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)  # NaN equals itself, True is not 1
    if isinstance(value, tuple):
        return tuple(map(_token, value))
    if isinstance(value, (numpy.ndarray, cuda.ndarray)) or (
            callable(value) and not isinstance(value, chainer.Link)):
        return id(value)
    return None
