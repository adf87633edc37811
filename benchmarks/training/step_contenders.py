"""Contenders from iterator to update, the timing of their steps, and a check that they agree."""

import concurrent.futures
import contextlib
import copy
import gc
import itertools
import os
import time

import chainer_bspmm
import chainer
from chainer.backends import cuda
from chainer.iterators import SerialIterator, ShuffleOrderSampler
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
from chainer_chemistry.datasets import NumpyTupleDataset
import numpy

from benchmarks import harness
from benchmarks.training.subjects import FIVE, N_LAYERS, N_UNIT
from chainer_bspmm.cuda import gemm
from chainer_bspmm.dataset import DeviceDataset
from chainer_bspmm.dataset.sparse_dataset import selection
from chainer_bspmm.training import GraphUpdater

UPSTREAM, GEOMETRIC, EAGER = 'upstream dense', 'PyTorch Geometric', 'ours eager'
CAPTURED, ON_DEVICE = 'ours captured', 'ours captured, DeviceDataset'
PACKED = ON_DEVICE + ', packed'  # our other contenders are folded
EAGER_PACKED = EAGER + ', packed'
GEOMETRIC_CAPTURED = 'PyTorch Geometric captured'
DRIVERS, PRECISIONS = ('jit', 'scan'), ('FP32', 'TF32')
SCANNED = 64  # number of batches on the device, which is the number of steps of a scan
JAX = {key: 'JAX %s, %s' % key for key in itertools.product(DRIVERS, PRECISIONS)}

WARM = 3
# After so many steps all of GraphUpdater's sizes have occurred, and most have passed the checks of
# their first 1,024 replays, each of which takes as long as an eager step.
WARM_CAPTURED = 3000
WARM_GEOMETRIC = 1000  # after so many steps all of its sizes have occurred; it has no checks

N_EQUAL = 16  # molecules of the batch on which contenders must agree
# With such a large eps Adam's step is nearly a multiple of the gradient, so that rounding errors of
# small gradients stay small. With such a large rate the rounding of parameters does not matter.
GENTLE = {'eps': 1.0, 'lr': 1e3}
STEP_ERROR = 1e-4  # largest relative error of a parameter's change in a step, in float32
# The same in TF32, where products round their factors to 10 bits: about 5e-4 in each of up to a
# dozen successive products, and in rectifiers that open or close because of it.
TF32_ERROR = 0.05


class Trainer:
    """Train a Chainer model by an updater whose arrays lie in a separate memory pool.

    The model is copied. The memory includes data that `data_set` puts on the device. All contenders
    have `run`, which takes a `multiple` of steps, and `wait` for the device.
    """

    multiple = 1

    def __init__(
        self, kind, model, converter, data_set, n_batch, device, optimizer=None, shuffle=True
    ):
        self._device = device
        self._pool = None if device.xp is numpy else cuda.cupy.cuda.MemoryPool()
        self.is_captured = kind is GraphUpdater
        self.model = copy.deepcopy(model)
        with self._memory():
            self.model.to_device(device)
            self.optimizer = (optimizer or chainer.optimizers.Adam()).setup(self.model)
            order = ShuffleOrderSampler(numpy.random.RandomState(0)) if shuffle else None
            iterator = SerialIterator(
                data_set(), n_batch, order_sampler=order, shuffle=None if shuffle else False
            )
            # Chainer's loop is not used for captured dense examples, because every new loop would
            # look for their sparse form again.
            self._has_loop = selection(iterator.dataset) is not None or not self.is_captured
            options = {'on_difference': 'raise'} if self.is_captured else {}
            self.updater = kind(
                iterator, self.optimizer, converter=converter, device=device, **options
            )

    def _memory(self):
        if self._pool is None:
            return contextlib.nullcontext()
        return cuda.cupy.cuda.using_allocator(self._pool.malloc)

    def run(self, n_steps):
        """Train by Chainer's loop, without extensions, so reported values are not read."""
        until = self.updater.iteration + n_steps, 'iteration'
        with self._memory():
            if self._has_loop:
                chainer.training.Trainer(self.updater, until, out=os.curdir).run()
            else:
                for _ in range(n_steps):
                    self.updater.update()

    def wait(self):
        if self._device.xp is not numpy:
            cuda.cupy.cuda.runtime.deviceSynchronize()  # for the streams of all libraries

    def warm(self, n_captured):
        """Run the first steps; `n_captured`: their number if it is captured."""
        self.run(n_captured if self.is_captured else WARM)
        self.programs()

    def programs(self):
        """Return the captured steps; raise AssertionError if they are missing."""
        if not self.is_captured:
            return []
        found = [
            program for program in self.updater._driver.programs.values() if program.is_captured
        ]
        if not found:
            raise AssertionError('trains eagerly: %s' % self.updater._driver.reason)
        return found

    def close(self):
        """Free the memory; a pool that is freed before its arrays would never return its blocks."""
        self.model = self.optimizer = self.updater = None
        gc.collect()
        if self._pool is not None:
            self._pool.free_all_blocks()

    def replay(self):
        """Replay the most used graph on its last batch."""
        program = max(self.programs(), key=lambda program: program._n_replays)
        staging = program._inputs._staging
        if staging.is_kernel:  # every launch takes a new batch from the slots
            staging.again()
        program.launch()

    def peak_bytes(self):
        """Return the size of its memory pools in bytes, or None on the host."""
        if self._pool is None:
            return None
        n_bytes = self._pool.total_bytes()
        if self.is_captured:
            n_bytes += self.updater.graph_nbytes
        return n_bytes


@contextlib.contextmanager
def tf32():
    """Context in which products round their factors to 10 bits, as with ``CUPY_TF32=1``."""
    float32 = numpy.dtype('f')
    before = cuda.cupy._core.get_compute_type(float32)
    cuda.cupy._core.set_compute_type(float32, gemm.CUPY_TF32)
    try:
        yield
    finally:
        cuda.cupy._core.set_compute_type(float32, before)


class InTF32(Trainer):
    """Train with products in TF32."""

    @contextlib.contextmanager
    def _memory(self):
        with tf32(), super()._memory():
            yield


class Geometric:
    """Train by PyTorch Geometric; see `geometric_models.Loaded` and `Captured`."""

    multiple = 1

    def __init__(self, make, is_captured):
        import torch

        self._torch = torch
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved()
        self._peer = make()
        self.is_captured = is_captured

    def run(self, n_steps):
        self._peer.run(n_steps)

    def wait(self):
        self._torch.cuda.synchronize()

    def warm(self, n_captured):
        self.run(min(n_captured, WARM_GEOMETRIC) if self.is_captured else WARM)
        # Memory that other contenders hold by now is subtracted.
        self._bytes = self._torch.cuda.memory_reserved() - self._before

    def replay(self):
        self._peer.replay()

    def peak_bytes(self):
        return self._bytes


class Jax:
    """Train by JAX; see `jax_models.Jitted`."""

    is_captured = False

    def __init__(self, jitted):
        self.multiple = jitted.multiple
        self.run, self.wait = jitted.run, jitted.wait

    def warm(self, n_captured):
        self.run(self.multiple * WARM)

    def peak_bytes(self):
        return None  # it shares a pool with all JAX contenders


def can_capture(device):
    return device.xp is not numpy


def steps_of_a_turn(contender, seconds, least, most):
    """Return the number of steps that fill so many seconds, a multiple of the contender's."""
    n_first = max(least, contender.multiple)
    contender.wait()
    start = time.perf_counter()
    contender.run(n_first)
    contender.wait()
    step = (time.perf_counter() - start) / n_first
    n_calls = int(numpy.clip(seconds / step, least, most) / contender.multiple)
    return max(1, n_calls) * contender.multiple


def turn(contender, n_steps):
    """Return [host, wall]: milliseconds a step until the last one was launched, and had ended."""
    clock = [time.perf_counter()]
    contender.run(n_steps)
    clock.append(time.perf_counter())
    contender.wait()
    clock.append(time.perf_counter())
    return [(end - clock[0]) * 1e3 / n_steps for end in clock[1:]]


def trainers(subject, n_batch, device, trainer=Trainer, **options):
    """Return name -> function that makes the `trainer`; without a GPU none is captured.

    Dense examples (`subject.data` is `subject.dense`) cannot be on the device.
    """

    def make(kind, model, converter, data_set):
        return lambda: trainer(
            kind,
            model,
            converter,
            data_set,
            n_batch,
            device,
            **{name: copy.deepcopy(value) for name, value in options.items()},
        )

    swapped = chainer_bspmm.sparsify(copy.deepcopy(subject.model))
    folded, packed = (subject.converters[layout] for layout in ('folded', 'packed'))
    found = {
        UPSTREAM: make(StandardUpdater, subject.model, upstream_concat_mols, lambda: subject.dense),
        EAGER: make(StandardUpdater, swapped, folded, lambda: subject.data),
        EAGER_PACKED: make(StandardUpdater, swapped, packed, lambda: subject.data),
    }
    if can_capture(device):
        found[CAPTURED] = make(GraphUpdater, swapped, folded, lambda: subject.data)
        if subject.data is not subject.dense:
            for name, converter in ((ON_DEVICE, folded), (PACKED, packed)):
                found[name] = make(
                    GraphUpdater, swapped, converter, lambda: DeviceDataset(subject.data, device)
                )
    return found


def peers(method, examples, sparse, n_batch, device):
    """Return name -> function that makes the `Geometric`."""
    from benchmarks.peers import geometric_models

    def network():
        n_labels = sparse.molecules.labels[0].shape[1]
        return geometric_models.network(method, N_UNIT, N_LAYERS, n_labels)

    def captured():
        order = ShuffleOrderSampler(numpy.random.RandomState(0))
        return geometric_models.Captured(
            network(), SerialIterator(sparse, n_batch, order_sampler=order), device
        )

    return {
        GEOMETRIC: lambda: Geometric(
            lambda: geometric_models.Loaded(network(), examples, n_batch, device), False
        ),
        GEOMETRIC_CAPTURED: lambda: Geometric(captured, True),
    }


def jax_peers(method, subject, sizes, device):
    """Return batch size -> name -> function that makes the `Jax`; all are compiled at once.

    Parameters, molecules and their order are the same as for other contenders.
    """
    from benchmarks.peers import jax_models

    first = jax_models.parameters_of(method, parameters(subject.model))
    compiled = {}
    for n_batch in sizes:
        order = ShuffleOrderSampler(numpy.random.RandomState(0))
        batches = jax_models.host_batches(
            SerialIterator(subject.data, n_batch, order_sampler=order), SCANNED
        )
        compiled[n_batch] = jax_models.compiled(method, first, batches, device)
    concurrent.futures.wait(future for of in compiled.values() for future in of.values())
    return {
        n_batch: {
            JAX[key]: lambda future=future: Jax(future.result()) for key, future in of.items()
        }
        for n_batch, of in compiled.items()
    }


def equal_sizes(dense, n_most=N_EQUAL):
    """Return indices of at most so many molecules of one size, which upstream does not pad."""
    sizes = numpy.array([len(example[0]) for example in dense])
    counts = numpy.bincount(sizes)
    counts[:4] = 0
    return numpy.flatnonzero(sizes == counts.argmax())[:n_most]


def mixed_sizes(dense):
    """Return indices of molecules of several sizes, which upstream pads."""
    return numpy.random.RandomState(0).permutation(len(dense))[:N_EQUAL]


def check(method, subject, names, device):
    """Compare the changes of parameters in one step from equal states, without dropout.

    Returns the largest relative error of any parameter's change, compared with upstream's. Packed
    batches have molecules of one size, the others also of several sizes. In methods other than the
    five some gradients are 0 except for rounding, so all changes are compared as one array. Raises
    AssertionError if an error is too large, or a step was not captured.
    """
    subject = subject._replace(model=without_dropout(subject.model))
    found = {}
    for index in (equal_sizes(subject.dense), mixed_sizes(subject.dense)):
        changes = changes_of(subject, index, [UPSTREAM, *names], device)
        names = [name for name in names if name not in (EAGER_PACKED, PACKED)]
        if method not in FIVE:
            changes = {name: {'all': flat(of)} for name, of in changes.items()}
        for name, error in judged(changes, UPSTREAM).items():
            found[name] = max(found.get(name, 0), error)
    return found


def flat(arrays):
    return numpy.concatenate([arrays[path].ravel() for path in sorted(arrays)])


def without_dropout(model):
    """Return a copy of a model without dropout."""
    model = copy.deepcopy(model)
    for link in model.links():
        if hasattr(link, 'dropout_ratio'):
            link.dropout_ratio = 0.0
    return model


def part_of(subject, index):
    """Return a subject with these molecules only."""
    columns = subject.dense.get_datasets()
    dense = NumpyTupleDataset(*([column[i] for i in index] for column in columns))
    data = dense if subject.data is subject.dense else subject.data[index]
    return subject._replace(dense=dense, data=data)


def changes_of(subject, index, names, device, trainer=Trainer):
    """Return name -> parameter -> its change in one step on these molecules."""
    adam = chainer.optimizers.Adam(alpha=GENTLE['lr'], eps=GENTLE['eps'])
    part = part_of(subject, index)
    makers = trainers(part, len(index), device, trainer, optimizer=adam, shuffle=False)
    changes = {}
    for name in dict.fromkeys(names):
        made = makers[name]()
        before = run_a_step(made)
        after = parameters(made.model)
        changes[name] = {path: after[path] - before[path] for path in before}
    return changes


def run_a_step(made):
    """Run the first step of a `Trainer` (a replay if captured); return the parameters before it."""
    before = parameters(made.model)
    if made.is_captured:
        made.run(1)  # the first step is eager, and the next one a replay
        put_back(made, before)
    made.run(1)
    made.programs()
    return before


def parameters(model):
    return {path: cuda.to_cpu(parameter.array).copy() for path, parameter in model.namedparams()}


def put_back(trainer, values):
    """Restore a trainer's parameters, and the initial state of its optimizer."""
    trainer.optimizer.t = 0
    for path, parameter in trainer.model.namedparams():
        parameter.array[...] = trainer.model.xp.asarray(values[path])
        parameter.update_rule.t = 0
        for array in (parameter.update_rule.state or {}).values():
            array[...] = 0


def check_peers(method, examples, subject, device):
    """Compare a captured step of PyTorch Geometric with an eager one; see :func:`check`."""
    from benchmarks.peers import geometric_models

    index = equal_sizes(subject.dense)
    sparse = subject.data
    n_labels = sparse.molecules.labels[0].shape[1]
    changes = {}
    for name in (GEOMETRIC, GEOMETRIC_CAPTURED):
        model = geometric_models.network(method, N_UNIT, N_LAYERS, n_labels).eval()
        if name == GEOMETRIC:
            peer = geometric_models.Loaded(
                model, [examples[i] for i in index], len(index), device, **GENTLE
            )
        else:
            peer = geometric_models.Captured(
                model, SerialIterator(sparse[index], len(index)), device, **GENTLE
            )
        before = {
            path: value.detach().cpu().numpy().copy() for path, value in model.named_parameters()
        }
        peer.run(1)
        changes[name] = {
            path: value.detach().cpu().numpy() - before[path]
            for path, value in model.named_parameters()
        }
    return judged(changes, GEOMETRIC)


def check_jax(method, subject, device):
    """Compare a step of JAX with ours, eager and packed; see :func:`check`."""
    from benchmarks.peers import jax_models
    import jax

    model = without_dropout(subject.model)
    part = subject.data[mixed_sizes(subject.dense)]
    before = parameters(model)
    first = jax_models.parameters_of(method, before)
    trainer = Trainer(
        StandardUpdater,
        chainer_bspmm.sparsify(copy.deepcopy(model)),
        subject.converters['packed'],
        lambda: part,
        len(part),
        device,
        chainer.optimizers.Adam(alpha=GENTLE['lr'], eps=GENTLE['eps']),
        shuffle=False,
    )
    trainer.run(1)
    expected = jax_models.parameters_of(
        method, {path: value - before[path] for path, value in parameters(trainer.model).items()}
    )
    batches = jax_models.host_batches(SerialIterator(part, len(part), shuffle=False), 1)
    # Chainer adds eps before it corrects the bias of the second moment, optax afterwards.
    eps = GENTLE['eps'] / numpy.sqrt(1 - trainer.optimizer.beta2)
    compiled = jax_models.compiled(
        method, first, batches, device, dropout=0, learning_rate=GENTLE['lr'], eps=eps
    )

    def named(tree):
        return {
            jax.tree_util.keystr(path): of for path, of in jax.tree_util.tree_leaves_with_path(tree)
        }

    found = {}
    for key, future in compiled.items():
        after = future.result().parameters  # after one step
        changes = {
            JAX[key]: named(jax.tree.map(lambda a, b: numpy.asarray(a) - b, after, first)),
            EAGER_PACKED: named(expected),
        }
        limit = TF32_ERROR if key[1] == 'TF32' else STEP_ERROR
        found.update(judged(changes, EAGER_PACKED, limit))
    return found


def judged(changes, reference, limit=None):
    """Return name -> largest relative error of changes; raise AssertionError if one is too large.

    `limit`: None means `STEP_ERROR`.
    """
    expected = changes.pop(reference)
    found = {
        name: max(harness.relative_error(of[path], expected[path]) for path in expected)
        for name, of in changes.items()
    }
    if not any(change.any() for change in expected.values()):
        raise AssertionError('a step of %s changed nothing' % reference)
    harness.gate(found, STEP_ERROR if limit is None else limit)
    return found


def ratio(cell, name, over):
    """Return the time of contender `over` over the time of `name`, or None if one was not run."""
    times = cell['milliseconds']
    if name not in times or over not in times:
        return None
    return times[over]['wall']['median'] / times[name]['wall']['median']


def over_jax(cell, precision, ours=PACKED):
    """Return JAX's time, the faster of jit and scan, over ours, packed and from the device.

    Returns None if one of the contenders was not run. `ours` is the name of our contender.
    """
    ratios = [ratio(cell, ours, JAX[driver, precision]) for driver in DRIVERS]
    return None if None in ratios else min(ratios)
