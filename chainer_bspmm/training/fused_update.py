"""The update of all parameters in one or a few launches, which a CUDA graph may capture.

Chainer launches at least one kernel for every parameter, and passes the learning rate by value,
which a captured graph would repeat. Here one launch updates up to 70 parameters
(kernels/fused_update.cu), and all values that change from step to step are read from device memory.
"""

import collections
import inspect
import itertools
from numbers import Real
import struct

import numpy

import chainer
from chainer import optimizer_hooks, optimizers
from chainer.backends import cuda
from chainer.optimizers import adam, momentum_sgd, rmsprop, sgd

from chainer_bspmm.compat.user_code import is_user_code
from chainer_bspmm.cuda import kernels, plans
from chainer_bspmm.cuda.launch import run

# About as many blocks as an H200 runs at once. A launch that sums squares writes one number for
# each block, and the next launch adds these up.
_MAX_BLOCKS = 1024
_THREADS = 256
# All arguments of a kernel may take 4 KB. The table of 70 parameters takes 3928 bytes.
_N_PARAMETERS = 70
# The kernel's Parameter: data, grad, three states, size, first_chunk, first_number.
_PARAMETER = numpy.dtype('u8, u8, 3u8, i8, i4, i4', align=True)
_TABLE = numpy.dtype(
    [('parameter', _PARAMETER, _N_PARAMETERS), ('n_parameters', 'i4'), ('n_chunks', 'i4')],
    align=True,
)


def _chunk(dtype):
    """Return the number of elements of a chunk: 16 bytes for each thread of a block."""
    return 16 * _THREADS // dtype.itemsize


# An optimizer's method, as the kernel computes it.
# rule_type: type of its update rules. variant: hyperparameters -> RULE of the kernel.
# states: names of the states of a rule, in the kernel's order.
# n_numbers, numbers: count of the kernel's numbers, and (hyperparameters, step) -> the numbers.
Method = collections.namedtuple('Method', 'rule_type variant states n_numbers numbers')


def _adam_numbers(hp, t):
    rate = adam._learning_rate(hp, t)
    return rate, 1 - hp.beta1, 1 - hp.beta2, hp.eps, hp.eta, hp.weight_decay_rate


def _adam_variant(hp):
    if hp.adabound:  # no kernel has it, and `why_unsupported` refuses it
        return 'ADABOUND'
    return 'AMSGRAD' if hp.amsgrad else 'ADAM'


def _rmsprop_variant(hp):
    return 'RMSPROP_EPS_INSIDE' if hp.eps_inside_sqrt else 'RMSPROP'


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
    optimizers.RMSprop: Method(
        rmsprop.RMSpropRule, _rmsprop_variant, ('ms',), 3, lambda hp, t: (hp.lr, hp.alpha, hp.eps)
    ),
}

# Type of a hook -> (its number in the kernel, function of a hook that returns its two values). The
# number is None for clipping by the norm, which needs another launch.
HOOKS = {
    optimizer_hooks.WeightDecay: (0, lambda hook: (hook.rate, 0)),
    optimizer_hooks.Lasso: (1, lambda hook: (hook.rate, 0)),
    optimizer_hooks.GradientHardClipping: (2, lambda hook: (hook.lower_bound, hook.upper_bound)),
    optimizer_hooks.GradientClipping: (None, lambda hook: (hook.threshold, 0)),
}
_MAX_HOOKS = 16  # each takes two bits of a 32-bit word


def why_unsupported(optimizer):
    """Return the reason (a clause, or None) why `FusedUpdate` does not support an optimizer."""
    return next(_reasons(optimizer), None)


def _reasons(optimizer):
    """Yield the reasons. Only the first is read, so the code after one may rely on its absence."""
    method = METHODS.get(type(optimizer))
    if method is None:
        kinds = ', '.join(sorted(kind.__name__ for kind in METHODS))
        yield 'the optimizer is %s, expected one of %s' % (_name(optimizer), kinds)
    if optimizer.target is None:
        yield 'the optimizer was not set up: call its method setup'
    if optimizer._loss_scale is not None or optimizer._loss_scaling_is_dynamic:
        yield 'the optimizer scales the loss'
    for name in _replaced(optimizer, type(optimizer)):
        yield 'the method %s of the optimizer was replaced' % name
    hook_kinds = map(type, optimizer._hookable._pre_update_hooks.values())
    for kind in (type(optimizer), method.rule_type, *hook_kinds):
        for name in _patched(kind):
            yield 'the method %s of %s was replaced' % (name, kind.__name__)
    for name in optimizer._hookable._post_update_hooks:
        yield "hook '%s' of the optimizer runs after the update" % name
    hooks = optimizer._hookable._pre_update_hooks
    for name, hook in hooks.items():
        this = "hook '%s' of the optimizer " % name
        if type(hook) not in HOOKS:
            kinds = ', '.join(sorted(kind.__name__ for kind in HOOKS))
            yield this + 'is %s, expected one of %s' % (_name(hook), kinds)
        for number in HOOKS[type(hook)][1](hook):
            if not isinstance(number, Real):
                yield this + 'has %r where a number is expected' % (number,)
    if len(hooks) > _MAX_HOOKS:
        yield 'the optimizer has %d hooks, expected at most %d' % (len(hooks), _MAX_HOOKS)
    paths = {}
    rules = {}
    devices = set()
    for path, param in optimizer.target.namedparams():
        this = "parameter '%s' " % path
        if id(param) in paths:
            yield this + "is also '%s': it would be updated twice in a step" % paths[id(param)]
        paths[id(param)] = path
        for reason in _reasons_of(param, method):
            yield this + reason
        other = rules.setdefault(id(param.update_rule), path)
        if param.update_rule is not None and other != path:
            yield this + "has the update rule of '%s'" % other
        if param.array is not None:
            devices.add(param.device)
    if len(devices) > 1:
        yield 'the parameters are on several devices: %s' % ', '.join(sorted(map(str, devices)))
    else:
        yield from _shared_memory(optimizer.target)


def _shared_memory(target):
    """Yield clauses about parameters in the same memory, which one launch would update at once."""
    ranges = []
    for path, param in target.namedparams(include_uninit=False):
        array = param.array
        if array.size:
            start = array.ctypes.data if isinstance(array, numpy.ndarray) else array.data.ptr
            ranges.append((start, start + array.nbytes, path))
    for (_, stop, path), (start, _, other) in itertools.pairwise(sorted(ranges)):
        if start < stop:
            yield "parameter '%s' shares memory with '%s'" % (other, path)


def _reasons_of(param, method):
    if param.device.xp is chainer.backend.chainerx:
        yield 'is an array of ChainerX'
    for name in _replaced(param, chainer.Parameter):
        yield 'has its own method %s' % name
    if param.layout is not None:
        yield 'has a layout, which is not supported'
    try:
        dtype = param.dtype
    except RuntimeError:  # a lazy parameter without a dtype
        dtype = None
    if dtype is not None and dtype not in (numpy.float32, numpy.float64):
        yield 'is %s, expected float32 or float64' % dtype
    if param._loss_scale is not None:
        yield 'has a scaled gradient'
    if param.array is not None and not param.array.flags.c_contiguous:
        yield 'is not C-contiguous'
    rule = param.update_rule
    if rule is None:
        return
    if type(rule) is not method.rule_type:
        yield 'is updated by %s, expected %s' % (_name(rule), method.rule_type.__name__)
    for name in _replaced(rule, type(rule)):
        yield 'is updated by a rule with its own method %s' % name
    for hooks in (rule._hookable._pre_update_hooks, rule._hookable._post_update_hooks):
        for name in hooks:
            yield "has hook '%s' on its update rule" % name
    if rule._use_fp32_update:
        yield 'is updated in float32 (use_fp32_update)'
    hp = rule.hyperparam
    if method is _ADAM and hp.adabound:
        yield 'is updated by Adam with adabound=True'
    if dtype is not None and method is _ADAM and hp.eps and not dtype.type(hp.eps):
        yield 'is %s, for which eps=%s of Adam is too small' % (dtype, hp.eps)
    if dtype is not None and method.rule_type is rmsprop.RMSpropRule and not dtype.type(hp.eps):
        yield 'is %s, for which eps=%s of RMSprop is too small' % (dtype, hp.eps)


def _replaced(thing, kind):
    """Yield the names of methods of the class `kind` that an object replaces by its own."""
    for name in vars(thing):
        if callable(getattr(kind, name, None)):
            yield name
    if isinstance(thing, chainer.Parameter) and type(thing).update is not kind.update:
        yield 'update'


def _patched(kind):
    """Yield the names of methods of a class that a script has replaced in the class."""
    for base in kind.__mro__:
        for name, value in vars(base).items():
            function = value.fget if isinstance(value, property) else value
            if inspect.isfunction(function) and is_user_code(function.__globals__.get('__name__')):
                yield name


def _name(thing):
    return '%s.%s' % (type(thing).__module__, type(thing).__qualname__)


class FusedUpdate:
    """Replacement of ``optimizer.update()`` in two parts: numbers on the host, and launches.

    Counters and states stay where Chainer has them (``optimizer.t``, ``rule.t``, ``rule.state``),
    so that snapshots contain them. Chainer's own GPU kernels give the same results, except for the
    rounding of the norm of the gradients. Deterministic.

    The optimizer must be supported (`why_unsupported`). If hooks are added or rules replaced later,
    make another object. ``n_numbers`` values change from step to step; :meth:`advance` returns
    them.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self._method = METHODS[type(optimizer)]
        self._params = list(optimizer.target.params())
        self._rules = [param.update_rule for param in self._params]
        self._lacks_rules = None in self._rules
        self._hooks = list(optimizer._hookable._pre_update_hooks.values())
        self._kinds = [HOOKS[type(hook)][0] for hook in self._hooks]
        self._width = self._method.n_numbers
        self.n_numbers = 2 * len(self._hooks) + self._width * len(self._params)
        self._pack = struct.Struct('%dd' % self._width).pack
        self._partials = None
        self.variants()

    def prepare(self):
        """Make missing states, scratch memory and kernels, after parameters have been made."""
        self.variants()
        groups = self._groups()
        if not groups:
            return
        for param, rule in zip(self._params, self._rules):
            if param.array is not None and _is_updated(rule):
                # This also moves states to the device if a snapshot has left them on the host.
                rule._init_states(param)
        with chainer.using_device(self._device(groups)):
            if self._partials is None:  # made only once, because captured graphs write there
                # At most so many launches write sums, for float32 and float64 parameters together.
                n_launches = 2 + len(self._params) // _N_PARAMETERS
                self._partials = [
                    cuda.cupy.empty(_MAX_BLOCKS * n_launches, numpy.float64)
                    for _ in range(self._kinds.count(None))
                ]
            self.load_kernels()

    def load_kernels(self):
        """Compile the kernels for the parameters that have been made."""
        for variant, dtype, positions in self._groups():
            device_id = self._params[positions[0]].array.data.device_id
            for name in {variant, 'NONE'} if self._hooks else {variant}:
                kernels.load(device_id, 'fused_update', dtype.char, defines(dtype, name))

    def variants(self):
        """Return the kernel's variant for each parameter (tuple of str, None for no update)."""
        # A captured graph is valid as long as the result is equal, and all parameters, gradients
        # and states are the same arrays. :meth:`advance` uses the attributes that are set here.
        common = self.optimizer.hyperparam
        variant_of = self._method.variant
        of_common = variant_of(common)
        n_rules = len(self._rules)
        self._are_plain = self._are_all_plain(common)
        if self._are_plain:  # nearly always
            self._counted = self._rules
            self._hyperparams = [common] * n_rules
            return (of_common,) * n_rules
        self._counted, self._hyperparams = [], []
        for rule in self._rules:
            if _is_updated(rule):
                self._counted.append(rule)
                self._hyperparams.append(_hyperparam_of(rule, common))
            else:
                self._hyperparams.append(None)
        hyperparams = self._hyperparams
        return tuple([of_common if hp is common else hp and variant_of(hp) for hp in hyperparams])

    def _are_all_plain(self, common):
        """Return whether all parameters are updated, with inherited hyperparameters only."""
        if self._lacks_rules or not all(rule.enabled for rule in self._rules):
            return False
        own = [rule.hyperparam.__dict__ for rule in self._rules]
        return own == [{'_parent': common}] * len(own)

    def advance(self):
        """Count the step, as ``optimizer.update()`` does, and return its numbers, (n_numbers,)."""
        # There are two numbers for every hook, then the numbers of every parameter, which begin
        # with its corrected learning rate.
        self.count(1)
        numbers_of = self._method.numbers
        pack = self._pack
        packed = [struct.pack('2d', *HOOKS[type(hook)][1](hook)) for hook in self._hooks]
        steps = {rule.t for rule in self._counted}
        if self._are_plain and len(steps) == 1:
            packed.append(pack(*numbers_of(self.optimizer.hyperparam, *steps)) * len(self._rules))
        else:
            known = {}
            for hp, rule in zip(self._hyperparams, self._rules):
                key = (id(hp), rule.t) if hp else None
                if key not in known:
                    known[key] = pack(*(numbers_of(hp, rule.t) if hp else [0] * self._width))
                packed.append(known[key])
        return numpy.frombuffer(b''.join(packed))

    def count(self, n_steps):
        """Add to the counters of the optimizer and its rules; -1 undoes `advance`."""
        counted = [self.optimizer, *self._counted]
        counters = [each.t + n_steps for each in counted]
        # No Python code runs while the counters are set, so an interrupt changes all or none.
        collections.deque(map(setattr, counted, itertools.repeat('t'), counters), maxlen=0)

    def launch(self, numbers):
        """Launch hooks and updates on the current stream; a CUDA graph may capture them."""
        # Afterwards gradients are as Chainer's hooks would leave them. Missing gradients become
        # zeros first, and a gradient that is not C-contiguous is replaced by a copy.
        self.optimizer.reallocate_cleared_grads()
        groups = self._groups()
        if not groups:
            return
        if self._hooks:  # hooks write to gradients, so these must not share memory
            own_gradients(param for param in self._params if param.array is not None)
        before = None
        first = 0
        with chainer.using_device(self._device(groups)):
            for after in self._partials:  # sums of squares are made before each clipping by norm
                stop = self._kinds.index(None, first)
                n_after = 0
                of_dtypes = self._groups(by_variant=False)
                for _, _, positions in sorted(of_dtypes, key=lambda group: group[1].char):
                    n_after += self._launch(
                        'NONE',
                        positions,
                        numbers,
                        hooks=slice(first, stop),
                        before=before,
                        after=after[n_after:],
                    )
                before = after[:n_after]
                first = stop + 1
            for variant, _, positions in groups:
                if variant != 'NONE' or self._kinds:
                    hooks = slice(first, None)
                    self._launch(variant, positions, numbers, hooks=hooks, before=before)

    def _device(self, groups):
        return self._params[groups[0][2][0]].device

    def _groups(self, by_variant=True):
        """Return [(variant, dtype, positions)] of the parameters that one launch can update."""
        groups = {}
        for position, (param, rule) in enumerate(zip(self._params, self._rules)):
            if param.array is not None:
                variant = 'NONE'
                if by_variant and _is_updated(rule):
                    variant = self._method.variant(rule.hyperparam)
                groups.setdefault((variant, param.dtype), []).append(position)
        return [(*group, positions) for group, positions in groups.items()]

    def _launch(self, variant, positions, numbers, hooks, before, after=None):
        """Launch a slice of the hooks, then the update; return the number of blocks.

        All parameters have one dtype. `before`: the sums that earlier launches have written, or
        None. Each block writes its sum to `after`, unless that is None.
        """
        kinds = self._kinds[hooks]
        word = sum(kind << 2 * i for i, kind in enumerate(kinds))
        n_before = 0 if before is None else before.size
        n_blocks = 0
        for start in range(0, len(positions), _N_PARAMETERS):
            table, n_chunks = self._table(positions[start : start + _N_PARAMETERS], variant)
            if not n_chunks:
                continue
            array = self._params[positions[start]].array
            grid = min(n_chunks, _MAX_BLOCKS)
            run(
                'fused_update',
                array,
                plans.Launch(defines(array.dtype, variant), (grid, 1, 1), (_THREADS, 1, 1)),
                table,
                numbers,
                before,
                None if after is None else after[n_blocks:],
                numbers=(
                    *map(numpy.int32, (n_before, hooks.start, len(kinds))),
                    numpy.uint32(word),
                ),
            )
            n_blocks += grid
        return n_blocks

    def _table(self, positions, variant):
        """Return the kernel's Table, a (1,) array that CuPy passes by value, and its chunks."""
        rows = []
        n_chunks = 0
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
            place = 2 * len(self._hooks) + self._width * position
            rows.append((array.data.ptr, grad.data.ptr, states, array.size, n_chunks, place))
            n_chunks += -(-array.size // _chunk(array.dtype))
        table = numpy.zeros(1, _TABLE)
        table['parameter'][0, : len(rows)] = rows
        table['n_parameters'] = len(rows)
        table['n_chunks'] = n_chunks
        return table, n_chunks


def own_gradients(params):
    """Copy gradients that share memory, as V's and W's in ``V + W`` do, or are not C-contiguous."""
    end = 0
    for param in sorted(params, key=lambda param: param.grad.data.ptr):
        is_shared = param.grad.data.ptr < end
        end = max(end, param.grad.data.ptr + param.grad.nbytes)
        if is_shared or not param.grad.flags.c_contiguous:
            param.grad = cuda.cupy.array(param.grad, order='C')


def _is_updated(rule):
    return rule is not None and rule.enabled


def _hyperparam_of(rule, common):
    """Return the hyperparameters of a rule, or `common` if it inherits all."""
    # `common` is returned because inherited hyperparameters are slow to read.
    hyperparam = rule.hyperparam
    own = vars(hyperparam)
    return common if len(own) == 1 and own.get('_parent') is common else hyperparam


def _state(rule, name, param):
    array = (rule.state or {}).get(name)
    expected = param.array
    if (
        type(array) is not type(expected)
        or (array.shape, array.dtype) != (expected.shape, expected.dtype)
        or not array.flags.c_contiguous
    ):
        got = type(array).__name__, getattr(array, 'dtype', None), getattr(array, 'shape', None)
        raise RuntimeError(
            "state '%s' of a parameter '%s': expected a C-contiguous array on its device, %s of "
            'shape %s, got %s, %s of shape %s'
            % (name, param.name, expected.dtype, expected.shape, *got)
        )
    return array


def defines(dtype, variant):
    """Return the kernel's compile-time constants (tuple of (str, object)) for a dtype."""
    return (
        ('VECTOR', 1),
        ('RULE', variant),
        ('CHUNK', _chunk(dtype)),
        ('N_PARAMETERS', _N_PARAMETERS),
        ('TABLE_BYTES', _TABLE.itemsize),
    )
