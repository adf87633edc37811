"""Values that a captured step reads from Python: when they change, it is captured again."""

import ctypes
import dis
import functools
import itertools
import types

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.compat.user_code import is_user_code

PLAIN = (bool, int, float, complex, str, bytes, type, numpy.generic, numpy.dtype)
BY_ID = (numpy.ndarray, cuda.ndarray, chainer.UpdateRule)
# Compared by type only: every step makes new variables, and contents are not watched.
OPAQUE = chainer.Variable, dict, list

# Their code keeps no arrays but in attributes.
KNOWN = 'builtins', 'chainer', 'chainer_chemistry', 'chainermn', 'chainer_bspmm', 'numpy', 'cupy'


class Guards:
    """Watch the values that a step reads from Python and that a captured graph would repeat.

    docs/captured_training.md lists them. Hyperparameters are watched, too: where one changes, the
    key is another object, but equal.

    `target` is the link that is trained or predicts, `function` what runs: a link, an object, a
    method or a function. `links` are the target's, and others that the function refers to; `params`
    are the parameters of the links, `other_params` those of them that are not the target's;
    `owners` are the links, and the objects that the function is or belongs to. `has_user_code`:
    what runs may be code of others than Chainer, Chainer Chemistry, and this package.
    """

    def __init__(self, target, function, optimizer=None):
        self._target = target
        self._function = function
        self._optimizer = optimizer
        self._look()

    def key(self):
        """Return a `Key`, equal if nothing has changed, the last one if nothing was replaced."""
        values = self._values()
        # Not item by item: comparing hundreds of objects takes a third of a step.
        if _addresses(values) != _addresses(self._last):
            self._find_states()
            values = self._values()
            if _differ(values, self._last):
                self._look()
            else:
                self._last = values
        return self._key

    def blocking_hook(self):
        """Return why (str or None) a hook or debug mode rules out replays, as of the last key."""
        if self._is_debug:
            return 'Chainer is in debug mode'
        names = [*chainer.get_function_hooks(), *chainer._get_link_hooks()]
        if any(self._link_hooks):
            names += itertools.chain.from_iterable(self._link_hooks)
        return 'the hook %s has to see every call' % names[0] if names else None

    def _values(self):
        """Return the values (tuple) that are watched, as they are now."""
        values = [*vars(chainer.config._local).values()]
        extend = values.extend
        for of_owner in self._attributes:
            extend(of_owner)
        for function in self._functions:
            extend(_surroundings(function).values())
        params = self.params
        values += [param._data[0] for param in params]
        values += [param._requires_grad for param in params]
        if self._optimizer is not None:
            if any(self._hooks):  # most are empty
                for hooks in self._hooks:
                    extend(hooks.values())
            values += [param.update_rule for param in self._target_params]
            values += [rule.enabled for rule in self._rules]
            values += [rule.hyperparam for rule in self._rules]
            values += [rule._state for rule in self._rules]
            extend(itertools.chain.from_iterable(self._states))
        return tuple(values)

    def _find_states(self):
        states = [rule._state for rule in self._rules]
        self._states = [of_rule.values() for of_rule in states if of_rule is not None]

    def _look(self):
        followed = _Followed(self._target, self._function)
        self.links = list(followed.links.values())
        params = {id(param): param for link in self.links for param in link.params()}
        self.params = list(params.values())
        self._target_params = list(self._target.params())
        known = set(map(id, self._target_params))
        self.other_params = [param for param in self.params if id(param) not in known]
        rules = []
        if self._optimizer is not None:
            rules = [param.update_rule for param in self._target_params]
        self._rules = [rule for rule in rules if rule is not None]
        hookables = self._rules if self._optimizer is None else [self._optimizer, *self._rules]
        self._hooks = [
            hooks
            for each in hookables
            for hooks in (each._hookable._pre_update_hooks, each._hookable._post_update_hooks)
        ]
        self.owners = [*self.links, *followed.owners.values()]
        self.has_user_code = bool(followed.functions) or any(
            _is_of_user(part) for owner in (self._function, *self.owners) for part in _parts(owner)
        )
        # Views show what is in a dict at the time. Making one takes half as long as reading it.
        self._attributes = [
            attributes.values()
            for attributes in (vars(chainer.global_config), *map(vars, self.owners))
        ]
        self._find_states()
        self._functions = list(followed.functions.values())
        hooks = [link._local_link_hooks for link in self.links]
        self._link_hooks = [of_link for of_link in hooks if of_link is not None]
        self._last = self._values()
        common, of_thread = vars(chainer.global_config), vars(chainer.config._local)
        configuration = {**common, **of_thread}
        self._is_debug = chainer.is_debug()
        names = ['the attribute %s of chainer.config' % name for name in configuration]
        values = [*configuration.values(), *self._last[len(common) + len(of_thread) :]]
        for owner in self.owners:
            called = getattr(owner, 'name', None) or type(owner).__name__
            names += ['the attribute %s of %s' % (name, called) for name in vars(owner)]
        for function in self._functions:
            names += [
                'the variable %s that %s reads' % (name, function.__name__)
                for name in _surroundings(function)
            ]
        names += ['a parameter or the optimizer'] * (len(values) - len(names))
        update = rules + [hook for hooks in self._hooks for hook in hooks.values()]
        self._key = Key(zip(names, values), self.owners, update)


class Key:
    """Snapshot of the watched values; equal to another where nothing differs.

    Arrays, functions and links are compared by ``id``. The key holds them, so that no other object
    can get the same one. `update` are the update rules, and hooks of the optimizer and the rules.
    """

    def __init__(self, named_values, owners, update):
        self.update = update
        self._held = list(owners)
        tokens = [('the model', tuple(map(id, owners)))]
        for name, value in named_values:
            token = _token(value)
            if token is not None:
                self._held.append(value)
                tokens.append((name, token))
        self._tokens = tuple(tokens)
        self._hash = hash(self._tokens)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return self is other or self._tokens == other._tokens

    def change(self, before):
        """Return the name of a value that differs from an earlier key."""
        for tokens, others in ((self, before), (before, self)):
            known = set(others._tokens)
            for name, token in tokens._tokens:
                if (name, token) not in known:
                    return name
        return 'the layout of the batches'


def _addresses(values):
    """Return the addresses (bytes) of the items of a tuple, from its memory."""
    return ctypes.string_at(id(values) + tuple.__basicsize__, tuple.__itemsize__ * len(values))


def _differ(values, others):
    return len(values) != len(others) or any(
        value is not other and (type(value) is not type(other) or type(value) not in OPAQUE)
        for value, other in zip(values, others)
    )


class _Followed:
    """By id, the links, the objects with a loss, and the functions that something uses."""

    def __init__(self, *things):
        self.links = {}
        self.owners = {}
        self.functions = {}
        self._follow(*things)

    def _follow(self, *things):
        for thing in things:
            if isinstance(thing, chainer.Link):
                for link in thing.links():
                    if id(link) not in self.links:
                        self.links[id(link)] = link
                        self._follow(
                            type(link).__call__,
                            getattr(type(link), 'forward', None),
                            *vars(link).values(),
                        )
            elif isinstance(thing, functools.partial):
                self._follow(thing.func, *thing.args, *thing.keywords.values())
            elif isinstance(thing, types.FunctionType):
                if id(thing) not in self.functions and is_user_code(thing.__module__):
                    self.functions[id(thing)] = thing
                    self._follow(*_surroundings(thing).values())
            elif isinstance(thing, types.MethodType):
                self._follow_owner(thing.__self__)
                self._follow(thing.__func__)
            elif callable(thing) and not isinstance(thing, type):
                self._follow_owner(thing)
                self._follow(type(thing).__call__)

    def _follow_owner(self, thing):
        if isinstance(thing, chainer.Link):
            self._follow(thing)
        elif hasattr(thing, '__dict__') and is_user_code(type(thing).__module__):
            if id(thing) not in self.owners:
                self.owners[id(thing)] = thing
                self._follow(*vars(thing).values())


def _is_of_user(value):
    """Return whether calling something may run a user's code."""
    module = getattr(value, '__module__', None) or ''
    return callable(value) and module.partition('.')[0] not in KNOWN


def _parts(owner):
    """Yield an object, its type, its attributes, and the items of those that are containers."""
    yield owner
    yield type(owner)
    for value in getattr(owner, '__dict__', {}).values():
        yield value
        if isinstance(value, (dict, list, tuple, set)):
            yield from value.values() if isinstance(value, dict) else value


def _surroundings(function):
    """Return name -> value of a function's closure, and of the globals that it names."""
    around = function.__globals__
    values = {name: around[name] for name in _names(function.__code__) if name in around}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            values[name] = None
    return values


@functools.lru_cache(maxsize=1024)
def _names(code):
    """Return the names (dict, in order) that code uses, functions within it included."""
    names = dict.fromkeys(
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in ('LOAD_GLOBAL', 'LOAD_NAME')
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_names(constant))
    return names


def _token(value):
    """Return the part of a key that stands for a value; None for one that is not watched."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)  # NaN equals itself, True is not 1
    if isinstance(value, tuple):
        return tuple(map(_token, value))
    if isinstance(value, BY_ID) or (callable(value) and not isinstance(value, chainer.Link)):
        return id(value)
    return None
