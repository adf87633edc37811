"""What a training step reads from Python, which a captured graph would go on using as it was."""
import operator

import numpy

import chainer
from chainer.backends import cuda

CONFIG = 'train', 'dtype', 'enable_backprop', 'keep_graph_on_report'
PLAIN = (bool, int, float, complex, str, bytes, type, numpy.generic, numpy.dtype)


class Frozen:
    """Give a key that changes when something frozen has changed.

    Covers the attributes of all links that are numbers, strings, tuples of them, functions or
    arrays, the parameters' arrays, whether they want a gradient and are updated, the optimizer's
    states, and Chainer's configuration. It does not look into lists and dicts of a link, nor into
    objects that are no links.

    Args:
        target (chainer.Link): of the optimizer, where there is one.
        loss_func (callable): so are those of this, where it is a link.
    """

    def __init__(self, target, loss_func):
        self._roots = [target]
        if isinstance(loss_func, chainer.Link) and loss_func is not target:
            self._roots.append(loss_func)
        self._links = []
        self._look()

    def key(self):
        """Return a hashable that equals an earlier one if nothing has changed since that."""
        if any(link.has_changed() for link in self._links):
            self._look()
        arrays = [part for param, rule in self._params
                  for part in (param._data[0], *(getattr(rule, 'state', None) or {}).values())]
        self._held = arrays  # or another array could take the number of one that is gone
        flags = [(param.requires_grad, rule and rule.enabled) for param, rule in self._params]
        return (self._key, tuple(map(id, arrays)), tuple(flags),
                tuple(getattr(chainer.config, name) for name in CONFIG))

    def changed(self, old, new):
        """Return what (str) differs between two keys."""
        names = {id(link.link): link.link.name or type(link.link).__name__
                 for link in self._links}
        for before, now in zip(old[0], new[0]):
            for one, other in zip(before[1:], now[1:]):
                if one != other:
                    return 'the attribute %s of %s' % (other[0], names[now[0]])
        for before, now, what in zip(old[1:], new[1:], (
                "a parameter's array", 'what is frozen', 'the configuration')):
            if before != now:
                return what
        return 'the layout of the batches'

    def hooks(self):
        """Return what (str or None) wants to see every call: functions and links with hooks."""
        names = [*chainer.get_function_hooks(), *chainer._get_link_hooks()]
        for link in self._links:
            names += link.link._local_link_hooks or ()
        return names[0] if names else None

    def _look(self):
        self._links = [_Attributes(link) for root in self._roots for link in root.links()]
        self._params = [
            (param, param.update_rule) for root in self._roots for param in root.params()]
        self._key = tuple(link.key for link in self._links)


class _Attributes:
    """The attributes of one link, and whether one was replaced since."""

    def __init__(self, link):
        self.link = link
        self._attributes = vars(link)
        self._values = list(self._attributes.values())
        self.key = (id(link),) + tuple(
            (name, token) for name, value in self._attributes.items()
            for token in [_token(value)] if token is not None)

    def has_changed(self):
        values = self._attributes.values()
        return len(values) != len(self._values) or not all(map(operator.is_, values, self._values))


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
