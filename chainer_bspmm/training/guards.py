"""`Guards`: the key of a program, computed from what a captured step can read from Python."""

import collections
import ctypes
import enum
import itertools
import weakref

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.training.kinds import is_of_user
from chainer_bspmm.training.reach import Reach
from chainer_bspmm.training.snapshot import has_same_bits
from chainer_bspmm.compat.user_code import LIBRARIES

# Types of values that are compared by their text, so that NaN equals itself. The text is made by
# the method of the type itself, not of a subclass.
PRINTED = {
    int: hex,  # Python refuses to print thousands of decimal digits
    **{kind: kind.__repr__ for kind in (float, complex, str, bytes, range, slice)},
    **{kind: kind.__repr__ for kind in (numpy.dtype, type(None))},
    numpy.generic: repr,
}
PLAIN = tuple(PRINTED)
BY_ID = (numpy.ndarray, cuda.ndarray, chainer.UpdateRule, enum.Enum)
# Types of values that are compared by type, because their contents are watched.
BY_TYPE = list, dict, set, collections.deque
# Types of values that every step makes anew, such as variables. They are compared by type only,
# unless their contents are watched.
OPAQUE = chainer.Variable, dict, list

# Largest array on the host, in elements, whose contents are watched. With a model on a GPU, code
# reads numbers from such an array in Python, so a replay would repeat them.
MAX_HOST_SIZE = 10000

# Libraries whose functions and classes do not count as a user's code, because they keep arrays in
# attributes only.
KNOWN = 'builtins', 'chainer', 'chainer_chemistry', 'chainermn', 'chainer_bspmm', 'numpy', 'cupy'


class References:
    """References of all guards to the values that they saw last: none of them is a user's.

    `n_changes` (int) stays the same for as long as the references stay the same.
    """

    def __init__(self):
        # A dict for its order: whoever looked last comes last.
        self._guards: dict[weakref.ref[Guards], None] = {}
        self.n_changes = 0

    def note(self, guards):
        """Note that guards refer to other values than before."""
        reference = weakref.ref(guards, self._forget)
        self._guards.pop(reference, None)
        self._guards[reference] = None
        self.n_changes += 1

    def are_at_least(self, n: int, value) -> bool:
        """Return whether there are n references to a value."""
        # There may be guards of many trainings. The guards of this one have looked just now, and
        # mostly have all of them. A list is taken, because guards may end at any time.
        for reference in reversed(list(self._guards)):
            if n <= 0:
                break
            guards = reference()
            if guards is not None:
                n -= guards.references(value)
        return n <= 0

    def _forget(self, reference):
        self._guards.pop(reference, None)
        self.n_changes += 1


references = References()


class Guards:
    """Watch the values that a step reads from Python and that a captured graph would repeat.

    docs/captured_training.md lists them. After a change of a hyperparameter the key is a new object
    that equals the old one.

    `target` is the link that is trained or predicts, `function` runs on a batch, and `reach` is the
    `Reach` of both. `params` are the parameters of all links within reach, `other_params` the ones
    that do not belong to the target. `has_user_code`: whether a user's code may run.
    """

    def __init__(self, target, function, optimizer=None):
        self._target = target
        self._function = function
        self._optimizer = optimizer
        self._outputs = set()  # names of watched values that every run replaces
        self._look()

    def key(self):
        """Return the present `Key`, which equals the last one if no watched value has changed.

        If no object was replaced, it is the same object.
        """
        values = self._values()
        sizes = self.reach.sizes()
        if (
            sizes != self._sizes
            or _addresses(values) != self._last_addresses
            or self._host_changed()
        ):
            self._find_states()
            values = self._values()
            if sizes != self._sizes or self._differ(values) or self._host_changed():
                self._look()
            else:
                self._keep(values)
        return self._key

    def blocking_hook(self):
        """Return the reason (str or None) why there can be no replays: a hook, or debug mode.

        A hook has to see every call. Links' hooks are taken from the last key.
        """
        if self._is_debug:
            return 'Chainer is in debug mode'
        names = [*chainer.get_function_hooks(), *chainer._get_link_hooks()]
        if any(self._link_hooks):
            names += itertools.chain.from_iterable(self._link_hooks)
        return 'the hook %s has to see every call' % names[0] if names else None

    def moment(self):
        """Return a `Moment` of the present state."""
        # A library's code alone makes no other objects reachable.
        return Moment(self.reach.anew() if self.has_user_code else self.reach)

    def ignore(self, outputs, others):
        """Stop watching `outputs`: names of values that every run replaces, so no run reads them.

        They are arrays and containers. Their types stay watched. A run that finds an array and
        leaves None therefore has a program of its own, whose replays assign None. `others`: names
        of values that a run did not replace; they may be inputs and stay watched.
        """
        outputs = (self._outputs | outputs) - others
        if outputs != self._outputs:
            self._outputs = outputs
            self._look()

    def references(self, value) -> int:
        """Return the number of references from here to a value."""
        addresses = numpy.frombuffer(self._last_addresses, numpy.uintp)
        n_last = int(numpy.count_nonzero(addresses == id(value)))
        return n_last + self.reach.references(value)

    def _values(self):
        """Return the present values (tuple) of everything that is watched, of outputs the types."""
        values = [*vars(chainer.config._local).values(), *vars(chainer.global_config).values()]
        self.reach.add_values(values)
        params = self.params
        values += [param._data[0] for param in params]
        values += [param._requires_grad for param in params]
        if self._optimizer is not None:
            if any(self._hooks):  # there are usually none
                for hooks in self._hooks:
                    values += hooks.values()
            values += [param.update_rule for param in params]
            for rule in self._rules:
                values += (rule.enabled, rule.hyperparam, rule._state)
            values += itertools.chain.from_iterable(self._states)
        for i in self._ignored:
            if i < len(values):  # there may be fewer values now, which is a difference anyway
                values[i] = type(values[i])
        return tuple(values)

    def _keep(self, values):
        self._last = values
        self._last_addresses = _addresses(values)
        references.note(self)

    def _differ(self, values):
        """Return whether values differ from the last ones in a way that may matter to a step."""
        if len(values) != len(self._last):
            return True
        for i, (value, last) in enumerate(zip(values, self._last)):
            if value is last:
                continue
            if i in self._ignored or type(value) is not type(last):
                return True
            if type(value) not in OPAQUE or self.reach.follows(last):
                return True
        return False

    def _host_changed(self):
        on_host = self._on_host  # there are usually none
        return bool(on_host) and any(array.tobytes() != contents for array, contents in on_host)

    def _find_states(self):
        states = [rule._state for rule in self._rules]
        self._states = [of_rule.values() for of_rule in states if of_rule is not None]

    def _look(self):
        reach = self.reach = Reach(self._target, self._function)
        links = list(reach.links.values())
        params = {id(param): param for link in links for param in link.params()}
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
        self.has_user_code = bool(reach.functions) or any(
            _is_of_user(part) for owner in (self._function, *links) for part in _parts(owner)
        )
        self._find_states()
        hooks = [link._local_link_hooks for link in links]
        self._link_hooks = [of_link for of_link in hooks if of_link is not None]
        self._is_debug = chainer.is_debug()
        common = vars(chainer.global_config)
        of_thread = vars(chainer.config._local)
        n_before = len(common) + len(of_thread)
        texts = reach.texts()
        self._ignored = [
            n_before + i for i, name in enumerate(_numbered(texts)) if name in self._outputs
        ]
        self._keep(self._values())
        self._sizes = reach.sizes()
        self._on_host = []
        if self._target.xp is not numpy:
            self._on_host = [
                (array, array.tobytes())
                for array in reach.values()
                if type(array) is numpy.ndarray and array.size <= MAX_HOST_SIZE
            ]
        configuration = {**common, **of_thread}
        named = [('the attribute %s of chainer.config' % n, v) for n, v in configuration.items()]
        named += reach.lengths()
        named += [
            (name[0], type(value) if name in self._outputs else value)
            for name, value in zip(_numbered(texts), reach.values(), strict=True)
        ]
        n_before += len(texts)
        named += [('a parameter or the optimizer', value) for value in self._last[n_before:]]
        named += [('the contents of an array on the host', held) for _, held in self._on_host]
        # The update also holds parameters that have no rule, because the norm of the gradients
        # includes theirs. Variables cannot be compared, but their ids can.
        update = [rule or id(param) for rule, param in zip(rules, self._target_params)]
        update += [hook for hooks in self._hooks for hook in hooks.values()]
        self._key = Key(named, links, update)


class Key:
    """Watched values at one moment; two keys are equal if no value differs.

    Arrays, functions and links are compared by ``id``. The key holds them, so that no other object
    can get the same id. `update`: the update rules (ids of parameters that have none), and the
    hooks of the optimizer and the rules.
    """

    def __init__(self, named_values, links, update):
        self.update = update
        self._held = list(links)
        tokens = [('the model', tuple(map(id, links)))]
        for text, value in named_values:
            token = _token(value)
            if token is not None:
                self._held.append(value)
                tokens.append((text, token))
        self._tokens = tuple(tokens)
        self._hash = hash(self._tokens)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return self is other or self._tokens == other._tokens

    def change(self, before):
        """Return words for the first value that differs from an earlier key's."""
        # Values are counted, because a container's length and its items have the same words.
        now, then = collections.Counter(self._tokens), collections.Counter(before._tokens)
        for text, _ in [*(now - then), *(then - now)]:
            return text
        return 'the layout of the batches'


class Moment:
    """State of Python that a run may change, at one moment: watched values, random numbers."""

    def __init__(self, reach):
        # A name is a pair (words, number), because several arrays may have the same words: one may
        # be an output, and another one not.
        names = _numbered(reach.texts())
        values = reach.values()
        self._arrays = {n: v for n, v in zip(names, values, strict=True) if _is_array(v)}
        self._containers = {n: v for n, v in zip(names, values) if type(v) in BY_TYPE}
        others = [(n[0], v) for n, v in zip(names, values) if not _is_array(v)]
        unwatched = reach.unwatched()
        self._unwatched = {
            name: value
            for name, (_, value) in zip(_numbered([t for t, _ in unwatched]), unwatched)
            if _is_array(value)
        }
        others += [(text, value) for text, value in unwatched if not _is_array(value)]
        self._key = Key([*reach.lengths(), *others], reach.links.values(), [])
        self._states = reach.states()

    def change(self, before):
        """Return words (str or None) for the first difference from an earlier moment."""
        for text, state in self._states.items():
            if state != before._states.get(text, state):
                return text
        text = self.change_of_values(before)
        if text is not None:
            return text
        pairs = (self._arrays, before._arrays), (self._unwatched, before._unwatched)
        for now, then in pairs:
            for name, array in now.items():
                last = then.get(name)
                if last is not array and (last is None or not has_same_bits(array, last)):
                    return name[0]
        return None

    def change_of_values(self, before):
        """Return words (str or None) for the first value, other than an array, that differs."""
        return None if self._key == before._key else self._key.change(before._key)

    def outputs(self, before):
        """Return two sets of names of arrays and containers: replaced since then, and others."""
        now, then = {**self._arrays, **self._containers}, {**before._arrays, **before._containers}
        replaced = {name for name, value in now.items() if then.get(name, value) is not value}
        return replaced, now.keys() - replaced


def _addresses(values):
    """Return the addresses (bytes) of the objects in a tuple, as they are in its memory.

    Comparing them takes a tenth of the time of comparing hundreds of objects one by one, and runs
    no method of theirs.
    """
    return ctypes.string_at(id(values) + tuple.__basicsize__, tuple.__itemsize__ * len(values))


def _is_array(value):
    return isinstance(value, chainer.get_array_types())


def _numbered(texts):
    """Return (text, number) for each text; the number counts equal texts before it."""
    counts = collections.Counter()
    names = []
    for text in texts:
        names.append((text, counts[text]))
        counts[text] += 1
    return names


def _is_of_user(value):
    """Return whether calling something may run a user's code."""
    # Only callables are asked for their module, because other objects of a user may raise.
    return callable(value) and (
        (getattr(value, '__module__', None) or '').partition('.')[0] not in KNOWN
    )


def _parts(owner):
    """Yield parts of an object that may be called: itself, its attributes, and their items."""
    yield owner
    yield type(owner)
    for value in getattr(owner, '__dict__', {}).values():
        yield value
        # A user's `__class__` or method of a subclass may raise, so neither is used.
        if issubclass(type(value), dict):
            yield from dict.values(value)
        for kind in (list, tuple, set):
            if issubclass(type(value), kind):
                yield from kind.__iter__(value)


def _token(value):
    """Return the token that represents a value in a key, or None if it is not watched."""
    kind = type(value)  # not `__class__`, about which an object may lie
    if issubclass(kind, BY_ID) or callable(value) and not issubclass(kind, chainer.Link):
        return id(value)
    if issubclass(kind, PLAIN):
        plain = kind if kind in PRINTED else next(p for p in PRINTED if issubclass(kind, p))
        return kind, PRINTED[plain](value)  # with the type, because True must differ from 1
    if issubclass(kind, tuple):
        return kind, tuple(map(_token, tuple.__iter__(value)))
    if issubclass(kind, frozenset):
        return kind, frozenset(map(_token, frozenset.__iter__(value)))
    if issubclass(kind, (chainer.Variable, chainer.Link)):
        return None  # every step makes new variables; links are listed separately in a key
    if issubclass(kind, BY_TYPE) or is_of_user(kind.__module__):
        return kind
    # Every step makes new objects of other classes of Chainer and this package, such as batches.
    return None if kind.__module__.partition('.')[0] in LIBRARIES else id(value)
