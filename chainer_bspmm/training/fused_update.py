"""The update of all parameters in one or a few launches, which a CUDA graph may capture.

Chainer launches at least one kernel for every parameter and passes the learning rate by value,
which a captured graph would repeat. Here one launch serves up to 70 parameters
(kernels/fused_update.cu), and everything that changes from step to step is read from device memory.
"""

import struct

import numpy

import chainer
from chainer.backends import cuda

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda.launch import NULL
from chainer_bspmm.training.supported import HOOKS
from chainer_bspmm.training.supported import METHODS
from chainer_bspmm.training.supported import why_unsupported

_MAX_BLOCKS = 1024  # about what is resident on an H200; the next launch adds one number of each
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


class FusedUpdate:
    """Do what ``optimizer.update()`` does, in two parts: numbers on the host, launches.

    Counters and states stay where Chainer has them (``optimizer.t``, ``rule.t``, ``rule.state``):
    snapshots hold them. The results are those of Chainer's own GPU kernels, up to the rounding of
    the norm of the gradients. Deterministic.

    Args:
        optimizer (chainer.Optimizer): set up, and supported (`why_unsupported`). If hooks are
            added or rules replaced later, make another object.

    Attributes:
        optimizer (chainer.Optimizer): the optimizer.
        n_numbers (int): how many numbers change from step to step, as `advance` returns them.

    Raises:
        ValueError: the optimizer is not supported.
    """

    def __init__(self, optimizer):
        reason = why_unsupported(optimizer)
        if reason:
            raise ValueError('optimizer: ' + reason)
        self.optimizer = optimizer
        self._method = METHODS[type(optimizer)]
        self._params = list(optimizer.target.params())
        self._rules = [param.update_rule for param in self._params]
        self._hooks = list(optimizer._hookable._pre_update_hooks.values())
        self._width = self._method.n_numbers
        self.n_numbers = 2 * len(self._hooks) + self._width * len(self._params)
        self._pack = struct.Struct('%dd' % self._width).pack
        self._partials = None
        self._were_plain = False
        self._variants = (None,)  # those of the last plain step: comparing them takes no time
        self._find_plain()

    def prepare(self):
        """Make missing states, scratch memory and kernels: after a first forward, before a capture.

        Raises:
            ValueError: a parameter that has been initialised by now is not supported.
        """
        reason = why_unsupported(self.optimizer)
        if reason:
            raise ValueError('optimizer: ' + reason)
        groups = self._groups()
        if not groups:
            return
        for param, rule in zip(self._params, self._rules):
            if param.array is not None and _is_updated(rule):
                # This also sends states to the device that a snapshot has left on the host.
                rule._init_states(param)
        first = self._params[groups[0][2][0]]
        with chainer.using_device(first.device):
            if self._partials is None:  # once: captured graphs keep writing there
                # Launches that leave sums, of float32 and of float64 parameters.
                n_launches = 2 + len(self._params) // _N_PARAMETERS
                self._partials = [
                    cuda.cupy.empty(_MAX_BLOCKS * n_launches, numpy.float64)
                    for _ in range(self._kinds().count(None))
                ]
            self.load_kernels()

    def load_kernels(self):
        """Compile the kernels for the parameters that have been made."""
        for variant, dtype, positions in self._groups():
            for name in {variant, 'NONE'} if self._hooks else {variant}:
                _load(self._params[positions[0]].array, dtype, name)

    def variants(self, is_unchanged=False):
        """Return which variant of the kernel updates each parameter (tuple; None: not updated).

        A captured graph is valid for as long as this is equal, and all parameters, gradients and
        states are the same arrays.
        """
        # Every step asks, and inherited options are slow to look up.
        if not is_unchanged:
            self._find_plain()
        self._were_plain = self._are_plain()
        if self._were_plain:
            variant = self._method.variant(self.optimizer.hyperparam)
            if variant != self._variants[0]:
                self._variants = (variant,) * len(self._rules)
            return self._variants
        inherits = self._inherits()
        common = None
        variants = []
        for rule in self._rules:
            variant = None
            if _is_updated(rule):
                if rule.hyperparam.__dict__ != inherits:
                    variant = self._method.variant(rule.hyperparam)
                else:
                    variant = common = common or self._method.variant(rule.hyperparam)
            variants.append(variant)
        return tuple(variants)

    def advance(self, is_unchanged=False):
        """Count the step, as ``optimizer.update()`` does, and return its numbers.

        Returns:
            numpy.ndarray: a new (n_numbers,) float64: two for every hook, then those of every
            parameter, the learning rate with its bias correction first.
        """
        numbers_of, rules = self._method.numbers, self._rules
        if not is_unchanged:
            self._find_plain()
            self._were_plain = self._are_plain()
        of_hooks = [number for hook in self._hooks for number in HOOKS[type(hook)][1](hook)]
        if self._were_plain:
            self.optimizer.t += 1
            for rule in rules:
                rule.t += 1
            steps = [rule.t for rule in rules]
            if steps.count(steps[0]) == len(steps):
                packed = self._pack(*numbers_of(self.optimizer.hyperparam, steps[0]))
                packed_hooks = struct.pack('%dd' % len(of_hooks), *of_hooks)
                return numpy.frombuffer(packed_hooks + packed * len(steps))
        else:
            self.count(1)
        numbers = numpy.empty(self.n_numbers)
        numbers[: len(of_hooks)] = of_hooks
        of_rules = numbers[len(of_hooks) :].reshape(-1, self._width)
        inherits = self._inherits()
        common, common_t = 0, None
        for own, rule in zip(of_rules, rules):
            if not _is_updated(rule):
                own[...] = 0
            elif rule.hyperparam.__dict__ != inherits:
                own[...] = numbers_of(rule.hyperparam, rule.t)
            else:  # rules at the same step that inherit all hyperparameters share their numbers
                if rule.t != common_t:
                    common, common_t = numbers_of(rule.hyperparam, rule.t), rule.t
                own[...] = common
        return numbers

    def count(self, n_steps):
        """Add to the counters of the optimizer and its rules; -1 undoes `advance`."""
        self.optimizer.t += n_steps
        for rule in self._rules:
            if rule is not None and rule.enabled:
                rule.t += n_steps

    def launch(self, numbers):
        """Run hooks and updates on the current stream; a CUDA graph may capture that.

        Gradients end as Chainer's hooks leave them; those that are None become zeros first. One
        that is not C-contiguous is replaced by a copy that is. Does not synchronise, and copies
        nothing from or to the host.

        Raises:
            ValueError: `numbers` is of another shape or dtype.
            RuntimeError: `prepare` was not called since a parameter was initialised or enabled.
        """
        if numbers.shape != (self.n_numbers,) or numbers.dtype != numpy.float64:
            raise ValueError(
                'numbers: got %s of shape %s, expected float64 of shape (%d,)'
                % (numbers.dtype, numbers.shape, self.n_numbers)
            )
        self.optimizer.reallocate_cleared_grads()
        groups = self._groups()
        if not groups:
            return
        if self._partials is None:
            raise RuntimeError('call prepare() before launch()')
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

    def _find_plain(self):
        """Find whether all parameters are updated with hyperparameters that may be inherited."""
        rules, self._parent = self._rules, self.optimizer.hyperparam
        self._own = []  # the attributes of the rules' hyperparameters; empty: not all inherit
        if all(
            rule is not None and rule.enabled and rule.hyperparam.parent is self._parent
            for rule in rules
        ):
            self._own = [vars(rule.hyperparam) for rule in rules]

    def _are_plain(self):
        """Return whether all parameters are updated, with the optimizer's hyperparameters."""
        return (
            bool(self._own)
            and self.optimizer.hyperparam is self._parent
            and max(map(len, self._own)) == 1  # the parent alone: none overrides a hyperparameter
        )

    def _inherits(self):
        """Return the hyperparameters' attributes of a rule that inherits all of them."""
        return {'_parent': self.optimizer.hyperparam}

    def _kinds(self):
        return [HOOKS[type(hook)][0] for hook in self._hooks]

    def _groups(self):
        """Return [(variant, dtype, positions)] of the parameters that one launch may serve."""
        groups = {}
        for position, (param, rule) in enumerate(zip(self._params, self._rules)):
            if param.array is not None:
                variant = self._method.variant(rule.hyperparam) if _is_updated(rule) else 'NONE'
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
