"""The update of all parameters in one or a few launches, which a CUDA graph may capture.

Chainer launches a kernel or more for every parameter and passes it the learning rate of the moment
by value, which a captured graph would repeat for ever. Here one launch serves up to 70 parameters,
kernels/fused_update.cu, and everything that changes from step to step is read from device memory.
"""

import collections
import numbers as abstract_numbers

import numpy

import chainer
from chainer import optimizer_hooks
from chainer import optimizers
from chainer.backends import cuda
from chainer.optimizers import adam
from chainer.optimizers import momentum_sgd
from chainer.optimizers import rmsprop
from chainer.optimizers import sgd

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda.launch import NULL

# How an optimizer updates: the type of its rules; which variant (RULE of the kernel) such a rule
# asks for; which of its states the kernel takes, in its order; and its numbers, how many and which,
# in the kernel's order.
_Method = collections.namedtuple('_Method', 'rule_type variant states n_numbers numbers')


def _adam_numbers(rule):
    hp = rule.hyperparam
    return rule.alpha_t, 1 - hp.beta1, 1 - hp.beta2, hp.eps, hp.eta, hp.weight_decay_rate


def _adam_variant(rule):
    if rule.hyperparam.adabound:  # no kernel's: `why_not` refuses it
        return 'ADABOUND'
    return 'AMSGRAD' if rule.hyperparam.amsgrad else 'ADAM'


def _rmsprop_variant(rule):
    return 'RMSPROP_EPS_INSIDE' if rule.hyperparam.eps_inside_sqrt else 'RMSPROP'


def _rmsprop_numbers(rule):
    hp = rule.hyperparam
    return hp.lr, hp.alpha, hp.eps


_ADAM = _Method(adam.AdamRule, _adam_variant, ('m', 'v', 'vhat'), 6, _adam_numbers)
_METHODS = {
    optimizers.Adam: _ADAM,
    optimizers.AdamW: _ADAM,
    optimizers.AMSGrad: _ADAM,
    optimizers.SGD: _Method(
        sgd.SGDRule, lambda rule: 'SGD', (), 1, lambda rule: (rule.hyperparam.lr,)
    ),
    optimizers.MomentumSGD: _Method(
        momentum_sgd.MomentumSGDRule,
        lambda rule: 'MOMENTUM_SGD',
        ('v',),
        2,
        lambda rule: (rule.hyperparam.lr, rule.hyperparam.momentum),
    ),
    optimizers.RMSprop: _Method(
        rmsprop.RMSpropRule, _rmsprop_variant, ('ms',), 3, _rmsprop_numbers
    ),
}

# Hooks: what the kernel calls them (None: its norm divides the launches), and their two numbers.
_HOOKS = {
    optimizer_hooks.WeightDecay: (0, lambda hook: (hook.rate, 0)),
    optimizer_hooks.Lasso: (1, lambda hook: (hook.rate, 0)),
    optimizer_hooks.GradientHardClipping: (2, lambda hook: (hook.lower_bound, hook.upper_bound)),
    optimizer_hooks.GradientClipping: (None, lambda hook: (hook.threshold, 0)),
}
_MAX_HOOKS = 16  # their kinds are two bits each of a 32-bit word

_MAX_BLOCKS = 1024  # about what fits an H200 at once; the next launch adds up a number of each
_THREADS = 256
# Kernel arguments are 4 KB at most: 70 parameters take 3928 bytes of them.
_N_PARAMETERS = 70
_TABLE = numpy.dtype(
    [
        (
            'parameter',
            numpy.dtype(
                [
                    ('data', numpy.uintp),
                    ('grad', numpy.uintp),
                    ('state', numpy.uintp, 3),
                    ('size', numpy.int64),
                    ('first_chunk', numpy.int32),
                    ('first_number', numpy.int32),
                ],
                align=True,
            ),
            _N_PARAMETERS,
        ),
        ('n_parameters', numpy.int32),
        ('n_chunks', numpy.int32),
    ],
    align=True,
)


def _chunk(dtype):
    """Return the elements of a chunk: 16 bytes for each thread of a block."""
    return 16 * _THREADS // dtype.itemsize


def why_not(optimizer):
    """Say what keeps an optimizer from being used with :class:`FusedUpdate`.

    Args:
        optimizer (chainer.Optimizer): which was set up.

    Returns:
        None where nothing does, else a sentence (str) that names what it is: a type of optimizer,
        rule or hook, an option, or a parameter.
    """
    method = _METHODS.get(type(optimizer))
    if method is None:
        return 'the optimizer is %s, expected one of %s' % (
            _name(optimizer),
            ', '.join(sorted(kind.__name__ for kind in _METHODS)),
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
        if type(hook) not in _HOOKS:
            return "hook '%s' of the optimizer is %s, expected one of %s" % (
                name,
                _name(hook),
                ', '.join(sorted(kind.__name__ for kind in _HOOKS)),
            )
        for number in _HOOKS[type(hook)][1](hook):
            if not isinstance(number, abstract_numbers.Real):
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
            return culprit + 'has a layout of its own'
        try:
            dtype = param.dtype
        except RuntimeError:  # neither initialised nor told
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


class FusedUpdate:
    """Do what ``optimizer.update()`` does, in two parts: numbers on the host, launches.

    Counters and states stay where Chainer has them (``optimizer.t``, ``rule.t``, ``rule.state``):
    snapshots hold them. The results are those of Chainer's own GPU kernels, up to the rounding of
    the norm of the gradients. Deterministic.

    Args:
        optimizer (chainer.Optimizer): which was set up, and of which `why_not` says None. Hooks
            that are added and rules that are replaced later are not noticed: make another object.

    Attributes:
        n_numbers (int): what changes from step to step, as `advance` returns it; fixed.

    Raises:
        ValueError: `why_not` says something.
    """

    def __init__(self, optimizer):
        reason = why_not(optimizer)
        if reason:
            raise ValueError('optimizer: ' + reason)
        self._optimizer = optimizer
        self._method = _METHODS[type(optimizer)]
        self._params = list(optimizer.target.params())
        self._rules = [param.update_rule for param in self._params]
        self._hooks = list(optimizer._hookable._pre_update_hooks.values())
        self._width = self._method.n_numbers
        self.n_numbers = 2 * len(self._hooks) + self._width * len(self._params)
        self._partials = None

    def prepare(self):
        """Make missing states, scratch memory and kernels; before a capture, after a first forward.

        Raises:
            ValueError: a parameter that has been initialised by now is not supported.
        """
        reason = why_not(self._optimizer)
        if reason:
            raise ValueError('optimizer: ' + reason)
        groups = self._groups()
        if not groups:
            return
        for param, rule in zip(self._params, self._rules):
            if param.array is not None and _is_updated(rule):
                # This also sends to the device what a snapshot has left on the host.
                rule._init_states(param)
        first = self._params[groups[0][2][0]]
        with chainer.using_device(first.device):
            if self._partials is None:  # once: graphs that were captured go on writing there
                # Launches that leave sums, of float32 and of float64 parameters.
                n_launches = 2 + len(self._params) // _N_PARAMETERS
                self._partials = [
                    cuda.cupy.empty(_MAX_BLOCKS * n_launches, numpy.float64)
                    for _ in range(self._kinds().count(None))
                ]
            for variant, dtype, _ in groups:
                for name in {variant, 'NONE'} if self._hooks else {variant}:
                    _load(first.array, dtype, name)

    def frozen(self):
        """Return what the launches cannot read from the device (hashable), but for the arrays.

        A captured graph holds as long as this is equal and all parameters, gradients and states
        are the arrays that they were: which rules are enabled, and their options.
        """
        # Inherited options are slow to look up, and this is asked at every step: do so once.
        inherits = self._inherits()
        common = None
        variants = []
        for rule in self._rules:
            variant = None
            if _is_updated(rule):
                if rule.hyperparam.__dict__ != inherits:
                    variant = self._method.variant(rule)
                else:
                    variant = common = common or self._method.variant(rule)
            variants.append(variant)
        return tuple(variants)

    def advance(self):
        """Count the step, as ``optimizer.update()`` does, and return its numbers.

        Returns:
            numpy.ndarray: a new (n_numbers,) float64: two for every hook, then those of every
            parameter, the learning rate with its bias correction first.
        """
        optimizer = self._optimizer
        optimizer.t += 1
        numbers_of = self._method.numbers
        inherits = self._inherits()
        common, common_t, others = 0, None, []
        for position, rule in enumerate(self._rules):
            if not _is_updated(rule):
                continue
            rule.t = t = rule.t + 1
            # Rules without a hyperparameter of their own and at the same step share their numbers.
            if t == common_t and rule.hyperparam.__dict__ == inherits:
                continue
            if common_t is None and rule.hyperparam.__dict__ == inherits:
                common, common_t = numbers_of(rule), t
            else:
                others.append((position, numbers_of(rule)))
        n_of_hooks = 2 * len(self._hooks)
        numbers = numpy.empty(self.n_numbers)
        for i, hook in enumerate(self._hooks):
            numbers[2 * i : 2 * i + 2] = _HOOKS[type(hook)][1](hook)
        of_rules = numbers[n_of_hooks:].reshape(-1, self._width)
        of_rules[...] = common
        for position, own in others:
            of_rules[position] = own
        return numbers

    def take_back(self):
        """Undo what `advance` counted: the step was not done."""
        self._optimizer.t -= 1
        for rule in self._rules:
            if _is_updated(rule):
                rule.t -= 1

    def launch(self, numbers):
        """Run hooks and updates on the current stream; a CUDA graph may capture that.

        Gradients end as Chainer's hooks leave them; those that are None become zeros first. Nothing
        is copied from or to the host, nothing synchronises. A gradient that is not C-contiguous is
        replaced by a copy that is.

        Args:
            numbers (cupy.ndarray): (n_numbers,) float64, what `advance` returned; read by the
                device when the launches run.

        Raises:
            ValueError: `numbers` is of another shape or dtype.
            RuntimeError: `prepare` was not called since a parameter was initialised or enabled.
        """
        if numbers.shape != (self.n_numbers,) or numbers.dtype != numpy.float64:
            raise ValueError(
                'numbers: got %s of shape %s, expected float64 of shape (%d,)'
                % (numbers.dtype, numbers.shape, self.n_numbers)
            )
        self._optimizer.reallocate_cleared_grads()
        groups = self._groups()
        if not groups:
            return
        if self._partials is None:
            raise RuntimeError('prepare() has to be called before launch()')
        kinds = self._kinds()
        first, before, n_before = 0, NULL, 0
        with chainer.using_device(self._params[groups[0][2][0]].device):
            for after in self._partials:
                stop = kinds.index(None, first)
                n_after = 0
                for dtype in sorted({dtype.char for _, dtype, _ in groups}):
                    positions = sorted(
                        position
                        for _, of, positions in groups
                        if of.char == dtype
                        for position in positions
                    )
                    n_after += self._launch(
                        'NONE',
                        positions,
                        numbers,
                        before,
                        after[n_after:],
                        n_before,
                        first,
                        kinds[first:stop],
                    )
                first, before, n_before = stop + 1, after, n_after
            for variant, _, positions in groups:
                if variant != 'NONE' or kinds:
                    self._launch(
                        variant, positions, numbers, before, None, n_before, first, kinds[first:]
                    )

    def _inherits(self):
        """Return what the hyperparameters of a rule hold that has none of its own."""
        return {'_parent': self._optimizer.hyperparam}

    def _kinds(self):
        return [_HOOKS[type(hook)][0] for hook in self._hooks]

    def _groups(self):
        """Return [(variant, dtype, positions)] of the parameters that one launch may serve."""
        groups = {}
        for position, (param, rule) in enumerate(zip(self._params, self._rules)):
            if param.array is not None:
                variant = self._method.variant(rule) if _is_updated(rule) else 'NONE'
                groups.setdefault((variant, param.dtype), []).append(position)
        return [(*group, positions) for group, positions in groups.items()]

    def _launch(self, variant, positions, numbers, before, after, n_before, first_hook, kinds):
        """Launch for these parameters, all of one dtype; return the number of blocks."""
        n_blocks = 0
        word = sum(kind << 2 * i for i, kind in enumerate(kinds))
        for start in range(0, len(positions), _N_PARAMETERS):
            table, n_chunks = self._table(positions[start : start + _N_PARAMETERS], variant)
            if not n_chunks:
                continue
            array = self._params[positions[start]].array
            grid = min(n_chunks, _MAX_BLOCKS)
            _load(array, array.dtype, variant)(
                (grid, 1, 1),
                (_THREADS, 1, 1),
                (
                    table,
                    numbers,
                    before,
                    NULL if after is None else after[n_blocks:],
                    numpy.int32(n_before),
                    numpy.int32(first_hook),
                    numpy.int32(len(kinds)),
                    numpy.uint32(word),
                ),
            )
            n_blocks += grid
        return n_blocks

    def _table(self, positions, variant):
        """Return the kernel's Table, a (1,) array that CuPy passes by value, and its chunks."""
        rows, n_chunks = [], 0
        for position in positions:
            param, rule = self._params[position], self._rules[position]
            grad = param.grad
            if not grad.flags.c_contiguous:
                grad = param.grad = cuda.cupy.ascontiguousarray(grad)
            states = [0, 0, 0]
            if variant != 'NONE':
                for i, name in enumerate(self._method.states):
                    if name != 'vhat' or variant == 'AMSGRAD':
                        states[i] = _state(rule, name, param).data.ptr
            array = param.array
            rows.append(
                (
                    array.data.ptr,
                    grad.data.ptr,
                    states,
                    array.size,
                    n_chunks,
                    2 * len(self._hooks) + self._width * position,
                )
            )
            n_chunks += -(-array.size // _chunk(array.dtype))
        table = numpy.zeros(1, _TABLE)
        table['parameter'][0, : len(rows)] = rows
        table['n_parameters'] = len(rows)
        table['n_chunks'] = n_chunks
        return table, n_chunks


def _is_updated(rule):
    return rule is not None and rule.enabled


def _state(rule, name, param):
    array = None if rule.state is None else rule.state.get(name)
    if type(array) is not type(param.array):
        raise RuntimeError(
            "state '%s' of a parameter '%s' is %s, expected an array on its device: "
            'prepare() makes it' % (name, param.name, type(array).__name__)
        )
    if array.shape != param.shape or array.dtype != param.dtype or not array.flags.c_contiguous:
        raise RuntimeError(
            "state '%s' of a parameter '%s' is %s of shape %s, expected %s of shape "
            '%s, C-contiguous'
            % (name, param.name, array.dtype, array.shape, param.dtype, param.shape)
        )
    return array


def _load(array, dtype, variant):
    return kernels.load(array.data.device_id, 'fused_update', dtype.char, defines(dtype, variant))


def defines(dtype, variant):
    """Return the compile-time constants (tuple of (str, object)) of the kernel for a dtype."""
    return (
        ('VECTOR', 1),
        ('RULE', variant),
        ('CHUNK', _chunk(dtype)),
        ('N_PARAMETERS', _N_PARAMETERS),
        ('TABLE_BYTES', _TABLE.itemsize),
    )
