"""Which optimizers and hooks :class:`FusedUpdate` supports, and why it refuses one."""

import collections
import numbers

import numpy

import chainer
from chainer import optimizer_hooks
from chainer import optimizers
from chainer.optimizers import adam
from chainer.optimizers import momentum_sgd
from chainer.optimizers import rmsprop
from chainer.optimizers import sgd

# How an optimizer updates: the type of its rules; hyperparameters -> variant (RULE of the kernel);
# names of the states, and the numbers (how many, (hyperparameters, step) -> which), in the kernel's
# order.
Method = collections.namedtuple('Method', 'rule_type variant states n_numbers numbers')


def _adam_numbers(hp, t):
    rate = adam._learning_rate(hp, t)
    return rate, 1 - hp.beta1, 1 - hp.beta2, hp.eps, hp.eta, hp.weight_decay_rate


def _adam_variant(hp):
    if hp.adabound:  # refused below; no kernel has it
        return 'ADABOUND'
    return 'AMSGRAD' if hp.amsgrad else 'ADAM'


def _rmsprop_variant(hp):
    return 'RMSPROP_EPS_INSIDE' if hp.eps_inside_sqrt else 'RMSPROP'


def _rmsprop_numbers(hp, t):
    return hp.lr, hp.alpha, hp.eps


_ADAM = Method(adam.AdamRule, _adam_variant, ('m', 'v', 'vhat'), 6, _adam_numbers)
METHODS = {
    optimizers.Adam: _ADAM,
    optimizers.AdamW: _ADAM,
    optimizers.AMSGrad: _ADAM,
    optimizers.SGD: Method(sgd.SGDRule, lambda hp: 'SGD', (), 1, lambda hp, t: (hp.lr,)),
    optimizers.MomentumSGD: Method(
        momentum_sgd.MomentumSGDRule,
        lambda hp: 'MOMENTUM_SGD',
        ('v',),
        2,
        lambda hp, t: (hp.lr, hp.momentum),
    ),
    optimizers.RMSprop: Method(rmsprop.RMSpropRule, _rmsprop_variant, ('ms',), 3, _rmsprop_numbers),
}

# Hooks: their number in the kernel (None: its norm needs another launch), and hook -> two numbers.
HOOKS = {
    optimizer_hooks.WeightDecay: (0, lambda hook: (hook.rate, 0)),
    optimizer_hooks.Lasso: (1, lambda hook: (hook.rate, 0)),
    optimizer_hooks.GradientHardClipping: (2, lambda hook: (hook.lower_bound, hook.upper_bound)),
    optimizer_hooks.GradientClipping: (None, lambda hook: (hook.threshold, 0)),
}
_MAX_HOOKS = 16  # two bits for each in a 32-bit word


def why_unsupported(optimizer):
    """Return why (str or None) an optimizer cannot be used with :class:`FusedUpdate`.

    The sentence names what is not supported: a type of optimizer, rule or hook, an option, or a
    parameter.
    """
    method = METHODS.get(type(optimizer))
    if method is None:
        return 'the optimizer is %s, expected one of %s' % (
            _name(optimizer),
            ', '.join(sorted(kind.__name__ for kind in METHODS)),
        )
    if optimizer.target is None:
        return 'the optimizer was not set up: call its method setup'
    if optimizer._loss_scale is not None or optimizer._loss_scaling_is_dynamic:
        return 'the optimizer scales the loss'
    return _why_not_hooks(optimizer) or _why_not_parameters(optimizer, method)


def _why_not_hooks(optimizer):
    for name in optimizer._hookable._post_update_hooks:
        return "hook '%s' of the optimizer runs after the update" % name
    hooks = optimizer._hookable._pre_update_hooks
    for name, hook in hooks.items():
        if type(hook) not in HOOKS:
            return "hook '%s' of the optimizer is %s, expected one of %s" % (
                name,
                _name(hook),
                ', '.join(sorted(kind.__name__ for kind in HOOKS)),
            )
        for number in HOOKS[type(hook)][1](hook):
            if not isinstance(number, numbers.Real):
                return "hook '%s' of the optimizer has %r where a number is expected" % (
                    name,
                    number,
                )
    if len(hooks) > _MAX_HOOKS:
        return 'the optimizer has %d hooks, expected at most %d' % (len(hooks), _MAX_HOOKS)
    return None


def _why_not_parameters(optimizer, method):
    seen, devices = {}, set()
    for path, param in optimizer.target.namedparams():
        culprit = "parameter '%s' " % path
        if id(param) in seen:
            return culprit + "is also '%s': it would be updated twice in a step" % seen[id(param)]
        seen[id(param)] = path
        if param.device.xp is chainer.backend.chainerx:
            return culprit + 'is an array of ChainerX'
        if param.layout is not None:
            return culprit + 'has a layout, which is not supported'
        try:
            dtype = param.dtype
        except RuntimeError:  # neither initialised nor given
            dtype = None
        if dtype is not None and dtype not in (numpy.float32, numpy.float64):
            return culprit + 'is %s, expected float32 or float64' % dtype
        if param._loss_scale is not None:
            return culprit + 'has a scaled gradient'
        if param.array is not None:
            devices.add(param.device)
            if not param.array.flags.c_contiguous:
                return culprit + 'is not C-contiguous'
        rule = param.update_rule
        if rule is not None:
            reason = _why_not_rule(rule, method, dtype)
            if reason:
                return culprit + reason
    if len(devices) > 1:
        return 'the parameters are on several devices: %s' % ', '.join(sorted(map(str, devices)))
    return None


def _why_not_rule(rule, method, dtype):
    if type(rule) is not method.rule_type:
        return 'is updated by %s, expected %s' % (_name(rule), method.rule_type.__name__)
    for hooks in (rule._hookable._pre_update_hooks, rule._hookable._post_update_hooks):
        for name in hooks:
            return "has hook '%s' on its update rule" % name
    if rule._use_fp32_update:
        return 'is updated in float32 (use_fp32_update)'
    hp = rule.hyperparam
    if method is _ADAM and hp.adabound:
        return 'is updated by Adam with adabound=True'
    if dtype is not None and method is _ADAM and hp.eps and not dtype.type(hp.eps):
        return 'is %s, for which eps=%s of Adam is too small' % (dtype, hp.eps)
    if dtype is not None and method.rule_type is rmsprop.RMSpropRule and not dtype.type(hp.eps):
        return 'is %s, for which eps=%s of RMSprop is too small' % (dtype, hp.eps)
    return None


def _name(thing):
    return '%s.%s' % (type(thing).__module__, type(thing).__qualname__)
