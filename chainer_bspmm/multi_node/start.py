"""Agreement of all ranks on one state of parameters and optimizer."""

import hashlib

import numpy

import chainer
from chainer.serializers import DictionarySerializer, NpzDeserializer

from chainer_bspmm.compat.user_code import is_user_code
from chainer_bspmm.multi_node import faults


def agree(comm, optimizer):
    """Give all ranks the parameters, persistent values and optimizer state of one of them.

    The others follow the first rank with the most parameters, usually rank 0; a rank lacks
    parameters if no batch has made them. Nothing is sent if all ranks have the same state, such as
    after resuming. ValueError: models or optimizers differ between ranks.
    """
    table = {path: _shape(param) for path, param in optimizer.target.namedparams()}
    tables = comm.mpi_comm.allgather((table, _settings(optimizer), int(optimizer.t)))
    for rank, other in enumerate(tables):
        message = _difference(tables[0], other, rank)
        if message:
            faults.raise_on(comm, 0, ValueError(message))
    counts = [sum(map(bool, table.values())) for table, _, _ in tables]
    root = counts.index(max(counts))
    make_states(optimizer.target)
    state = DictionarySerializer()
    optimizer.target.serialize(state['model'])
    optimizer.serialize(state['optimizer'])
    digests = comm.mpi_comm.allgather(_digest(state.target, table))
    if len(set(digests)) == 1 and min(counts) == counts[root]:
        return
    sent = comm.bcast_obj(state.target if comm.rank == root else None, root=root)
    if comm.rank != root:
        deserializer = NpzDeserializer(sent)
        optimizer.target.serialize(deserializer['model'])
        make_states(optimizer.target)
        optimizer.serialize(deserializer['optimizer'])


def make_states(target):
    """Make the states of update rules now; otherwise the first update would make them."""
    for param in target.params(include_uninit=False):
        if param.update_rule is not None and param.update_rule.enabled:
            param.update_rule._init_states(param)


def _settings(optimizer):
    """Return the settings of an optimizer that a user can choose, as name -> value."""
    settings = {'class': _kind_of(optimizer)}
    if isinstance(optimizer, chainer.GradientMethod):
        settings.update(_plain_of(optimizer.hyperparam))
    hookable = optimizer._hookable
    hooks = [*hookable._pre_update_hooks.items(), *hookable._post_update_hooks.items()]
    settings['list of hooks'] = [name for name, _ in hooks]
    for name, hook in hooks:
        settings['hook ' + name] = _kind_of(hook)
        if is_user_code(type(hook).__module__):  # its attributes may differ between ranks
            continue
        for attribute, value in _plain_of(hook).items():
            settings['%s of hook %s' % (attribute, name)] = value
    for path, param in optimizer.target.namedparams():
        rule = param.update_rule
        if rule is not None:
            settings["enabled of parameter '%s'" % path] = rule.enabled
            for name, value in _plain_of(rule.hyperparam).items():
                settings["%s of parameter '%s'" % (name, path)] = value
    return settings


def _kind_of(thing):
    kind = thing if hasattr(thing, '__qualname__') else type(thing)  # a hook may be a function
    return '%s.%s' % (kind.__module__, kind.__qualname__)


def _plain_of(thing):
    return {
        name: repr(value)  # tells NumPy's numbers from Python's, with which results may differ
        for name, value in getattr(thing, '__dict__', {}).items()
        if isinstance(value, (bool, int, float, str))
    }


def _shape(param):
    return (param.shape, param.dtype.name) if param.is_initialized else None


def _difference(first, other, rank):
    """Describe the first difference between rank 0 and another rank, or return None."""
    (shapes, settings, t), (other_shapes, other_settings, other_t) = first, other
    for path in sorted({*shapes, *other_shapes}):
        this = "model: expected the same on all ranks, parameter '%s' is " % path
        if (path in shapes) != (path in other_shapes):
            return this + 'on rank %d only' % (0 if path in shapes else rank)
        one, two = shapes[path], other_shapes[path]
        if one and two and one != two:
            words = one[1], one[0], two[1], two[0], rank
            return this + '%s of shape %s on rank 0 and %s of shape %s on rank %d' % words
    for name in dict.fromkeys([*settings, *other_settings]):
        value, other_value = settings.get(name), other_settings.get(name)
        if value != other_value:
            text = (
                'optimizer: %s: expected the same on all ranks, got %s on rank 0 and %s on rank %d'
            )
            return text % (name, value, other_value, rank)
    if t != other_t:
        return (
            'optimizer: expected the same number of updates on all ranks, got %d on rank 0 and %d '
            'on rank %d; load a snapshot on every rank' % (t, other_t, rank)
        )
    return None


def _digest(state, table):
    """Return a checksum of the parameters and the optimizer's state, not of other values."""
    digest = hashlib.sha1()
    parameters = {'model' + path for path in table}
    for name in sorted(state):
        if name in parameters or name.startswith('optimizer/'):
            array = numpy.ascontiguousarray(state[name])
            digest.update(name.encode())
            digest.update(array.tobytes() if array.dtype != object else b'')
    return digest.hexdigest()
