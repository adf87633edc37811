"""Updates by Adam on a host: for small parameters NumPy's calls take longer than the arithmetic."""

import copy
import types

import numpy

import chainer
from chainer.optimizers.adam import AdamRule


def update(optimizer, lossfun, *args, **kwargs):
    """Do ``optimizer.update``, to the bit, with one call for all parameters that are alike."""
    if type(optimizer).update is not chainer.GradientMethod.update:
        optimizer.update(lossfun, *args, **kwargs)
        return
    loss, target = lossfun(*args, **kwargs), optimizer.target
    uses_cleargrads = getattr(optimizer, '_use_cleargrads', True)
    (target.cleargrads if uses_cleargrads else target.zerograds)()
    loss.backward(loss_scale=optimizer._loss_scale)
    del loss
    optimizer.reallocate_cleared_grads()
    optimizer.check_nan_in_grads()
    optimizer.call_hooks('pre')
    optimizer.t += 1
    if optimizer.is_safe_to_update():
        _update_all(target.params())
    optimizer.call_hooks('post')
    optimizer.update_loss_scale()


def _update_all(params):
    params, groups = list(params), {}
    # One that two links share is updated twice.
    are_distinct = len({id(param.array) for param in params}) == len(params)
    for param in params:
        rule = param.update_rule
        if are_distinct and _is_plain(param, rule):
            groups.setdefault((rule.t, rule.hyperparam.parent, param.dtype), []).append(param)
        else:
            param.update()
    for some in groups.values():
        _update_at_once(some)


def _is_plain(param, rule):
    """Return whether a parameter is updated element by element, as others with the same options."""
    return (
        type(rule) is AdamRule
        and rule.enabled
        and rule.state is not None
        and len(vars(rule.hyperparam)) == 1  # the parent alone: it inherits all
        and not (rule._hookable._pre_update_hooks or rule._hookable._post_update_hooks)
        and not rule._use_fp32_update
        and param._loss_scale is None
        and {*map(type, rule.state.values()), type(param.array)} == {numpy.ndarray}
        and param.array.base is None  # a view may share elements
        and {state.shape for state in rule.state.values()} == {param.shape}
    )


def _update_at_once(params):
    rules = [param.update_rule for param in params]
    joint = copy.copy(rules[0])
    joint.t += 1
    joint._state = {name: _joined([rule.state[name] for rule in rules]) for name in joint.state}
    both = types.SimpleNamespace(
        data=_joined([param.array for param in params]),
        grad=_joined([param.grad for param in params]),
        dtype=params[0].dtype,
    )
    joint.update_core_cpu(both)
    stop = 0
    for param, rule in zip(params, rules):
        start, stop = stop, stop + param.size
        rule.t += 1
        param.array[...] = both.data[start:stop].reshape(param.shape)
        for name, state in rule.state.items():
            state[...] = joint._state[name][start:stop].reshape(param.shape)


def _joined(arrays):
    return numpy.concatenate([array.ravel() for array in arrays])
