"""How long do a training step and a prediction take: upstream dense, ours, PyTorch Geometric?

``python -m benchmarks.training.bench_training --tox21 tox21.csv.gz`` runs on the CPU, with
``--device 0`` on a GPU, and writes ``benchmarks/results/<gpu or cpu>/training.json``;
``python -m benchmarks.plot training`` draws it.
"""

import copy
import importlib.util
import os
import time
import tracemalloc

import chainer_bspmm
import chainer
from chainer import functions
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
import numpy

from benchmarks import data_sets
from benchmarks import harness
from benchmarks.training import subjects
from benchmarks.training.subjects import FIVE, GEOMETRIC, METHODS, N_LAYERS, N_UNIT, UPSTREAM
from benchmarks.training.subjects import MAX_ROUNDS, MIN_ROUNDS

BATCHES = (32, 128, 1024)
SECONDS = 6
SHORT = 0.1  # seconds of a step before which caches are warmed

FOLDED, PACKED, PADDED = LAYOUTS = 'ours folded', 'ours packed', 'ours padded'

# float32 numbers of a molecule and pair of padded atoms in upstream's largest array, (B, N, N, R,
# heads, 2 C) and (B, R, N, N, C). A layer keeps about four of them for the backward pass: more than
# there is memory for in large batches.
PAIR_NUMBERS = {'relgat': 4 * 3 * 2 * N_UNIT, 'gnnfilm': 5 * N_UNIT}
COPIES = 4 * N_LAYERS

# The parts between the times that a contender records.
TRAINING = ('fetch', 'convert', 'forward', 'backward', 'update', 'wait')
INFERENCE = ('fetch', 'convert', 'forward')
N_CONVERTER = 2  # the first of these parts are the converter's

# Ratios over upstream at a training step on Tox21, folded, converter included: batch, at least, and
# other bounds of single methods.
BARS = {'cpu': ((128, 4.0, {'nfp': 8.0}),), 'gpu': ((128, 1.5, {}), (1024, 3.0, {}))}
ADJACENCY_BAR = 50
OUTPUT_ERROR, GRADIENT_ERROR = 1e-5, 1e-4  # float32 on both sides


class Contender:
    """Train and predict with a model on a data set, and record the time after every part.

    Args:
        model (chainer.Link): Classifier or Regressor.
        converter (callable): of a list of examples and a device.
        data_set (sequence): of examples.
        device (chainer.backend.Device): where.
    """

    is_chainer = True

    def __init__(self, model, converter, data_set, device):
        self.model = copy.deepcopy(model)
        self.model.to_device(device)
        self._converter = converter
        self._data_set = data_set
        self._device = device
        self._optimizer = chainer.optimizers.Adam()
        self._optimizer.setup(self.model)

    def train(self, index):
        """Return the times before, between and after the parts `TRAINING` of a step."""
        clock = [time.perf_counter()]
        arrays = self.convert(index, clock)
        loss = self.model(*arrays)  # reads loss and metric, and so waits for the device
        clock.append(time.perf_counter())
        self.model.cleargrads()
        loss.backward()
        clock.append(time.perf_counter())
        self._optimizer.update()
        clock.append(time.perf_counter())
        self.synchronize()
        return clock + [time.perf_counter()]

    def predict(self, index):
        """Return the times before, between and after the parts `INFERENCE`."""
        clock = [time.perf_counter()]
        arrays = self.convert(index, clock)
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            cuda.to_cpu(self.model.predictor(*arrays[:-1]).array)
        return clock + [time.perf_counter()]

    def convert(self, index, clock):
        fetched = [self._data_set[i] for i in index]
        clock.append(time.perf_counter())
        arrays = self._converter(fetched, None if self._device.xp is numpy else self._device)
        self.synchronize()
        clock.append(time.perf_counter())
        return arrays

    def synchronize(self):
        if self._device.xp is not numpy:
            cuda.Stream.null.synchronize()

    def peak_bytes(self, index):
        """Return what a step allocates at most beyond parameters and the optimizer's state."""
        if self._device.xp is numpy:
            tracemalloc.start()
            self.train(index)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak
        pool = cuda.cupy.cuda.MemoryPool()
        with cuda.cupy.cuda.using_allocator(pool.malloc):
            self.train(index)
        self.model.cleargrads()
        return pool.total_bytes()

    def nodes(self, index):
        """Return how many function nodes run forward, and how many in the backward pass."""
        arrays = self.convert(index, [])
        with Applied() as applied:
            loss = self.model(*arrays)
            forward = applied.count
            self.model.cleargrads()
            loss.backward()
        return {'forward': forward, 'backward': applied.count - forward}


class Applied(chainer.FunctionHook):
    """Count the nodes that are applied."""

    name = 'Applied'

    def __init__(self):
        self.count = 0

    def forward_preprocess(self, function, in_data):
        self.count += 1


def contenders(method, dense, sparse, device):
    """Return {name: contender}, those of Chainer with the same parameters."""
    labels = numpy.stack([dense[i][-1] for i in range(len(dense))])
    model = subjects.upstream_model(method, labels, [dense[0]])
    swapped = chainer_bspmm.sparsify(copy.deepcopy(model))
    found = {UPSTREAM: Contender(model, upstream_concat_mols, dense, device)}
    for name in LAYOUTS:
        converter = chainer_bspmm.CSRConverter(name.split()[-1])
        found[name] = Contender(swapped, converter, sparse, device)
    if importlib.util.find_spec('torch_geometric'):
        from benchmarks.peers import geometric_models

        if method in geometric_models.PEERS:
            found[GEOMETRIC] = geometric_models.Contender(
                method,
                geometric_models.examples_of(sparse),
                N_UNIT,
                N_LAYERS,
                labels.shape[1],
                device,
            )
    return found


def check(found, index):
    """Raise AssertionError where packed is not upstream alone, or the others not in a batch."""

    def run(name, index):
        contender = found[name]
        contender.model.cleargrads()
        with chainer.using_config('train', False):
            y = contender.model.predictor(*contender.convert(index, [])[:-1])
            functions.sum(y * y).backward()
        return cuda.to_cpu(y.array), {
            path: cuda.to_cpu(parameter.grad)
            for path, parameter in contender.model.namedparams()
            if parameter.grad is not None
        }

    alone = numpy.concatenate([run(UPSTREAM, [i])[0] for i in index])
    expected, expected_gradients = run(UPSTREAM, index)
    outputs = {'packed': harness.relative_error(run(PACKED, index)[0], alone)}
    gradients = {}
    for name in (FOLDED, PADDED):
        y, found_gradients = run(name, index)
        layout = name.split()[-1]
        outputs[layout] = harness.relative_error(y, expected)
        gradients[layout + ', gradients'] = max(
            harness.relative_error(found_gradients[path], expected_gradients[path])
            for path in expected_gradients
        )
    harness.gate(outputs, OUTPUT_ERROR)
    harness.gate(gradients, GRADIENT_ERROR)
    return {**outputs, **gradients}


def fits(method, n_batch, largest, device):
    """Tell whether upstream's batch with a molecule of `largest` atoms fits into free memory."""
    n_bytes = 4 * PAIR_NUMBERS.get(method, 0) * COPIES * n_batch * largest**2
    if device.xp is numpy:
        free = os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    else:
        free = cuda.cupy.cuda.runtime.memGetInfo()[0]
    return n_bytes < 0.8 * free


def measure_steps(found, n_molecules, n_batch, seconds):
    """Time training steps and predictions of all contenders, interleaved.

    Every round takes other molecules, the same for all. The first is not measured. A contender's
    turn begins with an unmeasured step, unless its steps are long: otherwise it would pay for the
    processor's caches, which the contender before it has filled.

    Returns:
        dict: name -> {'training', 'inference'} -> {'with converter', 'without': summaries in
        milliseconds, 'parts': medians}; and the number of rounds.
    """
    rng = numpy.random.RandomState(0)
    times = {name: {'training': [], 'inference': []} for name in found}
    start, n_rounds = None, 0
    while n_rounds < MIN_ROUNDS or (
        time.perf_counter() - start < seconds and n_rounds < MAX_ROUNDS
    ):
        index = rng.choice(n_molecules, n_batch, replace=False).tolist()
        for name, contender in found.items():
            for kind, call in (('training', contender.train), ('inference', contender.predict)):
                clock = call(index)
                if clock[-1] - clock[0] < SHORT:
                    clock = call(index)
                if start is not None:
                    times[name][kind].append(numpy.diff(clock) * 1e3)
        if start is None:
            start = time.perf_counter()
        else:
            n_rounds += 1
    return {
        name: {kind: summaries(numpy.array(rows), kind) for kind, rows in of.items()}
        for name, of in times.items()
    }, n_rounds


def summaries(rows, kind):
    parts = zip(TRAINING if kind == 'training' else INFERENCE, numpy.median(rows, axis=0))
    return {
        'with converter': harness.summary(rows.sum(axis=1).tolist()),
        'without': harness.summary(rows[:, N_CONVERTER:].sum(axis=1).tolist()),
        'parts': {part: round(float(value), 3) for part, value in parts},
    }


def launches(contender, index):
    """Return the kernels, copies and fills that a training step launches on a GPU.

    PyTorch's profiler sees those of every library in the process.
    """
    from torch import autograd
    from torch import profiler

    contender.train(index)
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as found:
        contender.train(index)
    counts = {'kernels': 0, 'copies': 0, 'fills': 0}
    for event in found.events():
        if event.device_type == autograd.DeviceType.CUDA:
            kind = {'Memcpy': 'copies', 'Memset': 'fills'}.get(event.name.split()[0], 'kernels')
            counts[kind] += 1
    return counts


def run_method(method, dense, sparse, device, batches, seconds):
    """Return everything that is measured of a method on a data set."""
    found = contenders(method, dense, sparse, device)
    rng = numpy.random.RandomState(1)
    few = rng.permutation(len(dense))[:8].tolist()
    result = {
        'relative_errors': check(found, few),
        'adjacency of the set': data_sets.adjacency_bytes(dense, sparse),
        'batches': {},
    }
    result['nodes a step'] = {
        name: contender.nodes(few) for name, contender in found.items() if contender.is_chainer
    }
    if device.xp is not numpy and importlib.util.find_spec('torch'):
        try:
            result['launches a step'] = {
                name: launches(contender, few) for name, contender in found.items()
            }
        except RuntimeError as error:  # another profiler may be attached: times matter more
            result['not_run'] = {'launches a step': str(error)}
    for n_batch in batches:
        if n_batch > len(dense):
            continue
        running = dict(found)
        if not fits(method, n_batch, result['adjacency of the set']['largest molecule'], device):
            del running[UPSTREAM]
        milliseconds, n_rounds = measure_steps(running, len(dense), n_batch, seconds)
        index = rng.permutation(len(dense))[:n_batch].tolist()
        result['batches'][str(n_batch)] = {
            'n_rounds': n_rounds,
            'milliseconds': milliseconds,
            'not_run': {
                name: 'needs more memory than available' for name in found if name not in running
            },
            'peak_bytes': {
                name: peak
                for name, peak in (
                    (name, contender.peak_bytes(index)) for name, contender in running.items()
                )
                if peak is not None
            },
        }
    return result


def ratio(found, name, kind='training', what='with converter'):
    """Return upstream's median time over another's; NaN where upstream was not run."""
    times = found['milliseconds']
    if UPSTREAM not in times:
        return float('nan')
    return times[UPSTREAM][kind][what]['median'] / times[name][kind][what]['median']


def bars_met(methods, place):
    """Return {bar: whether it was met} of the five models on Tox21."""
    met = {}
    for method in FIVE:
        if method not in methods:
            continue
        for n_batch, least, others in BARS[place]:
            found = methods[method]['batches'].get(str(n_batch))
            least = others.get(method, least)
            if found is not None:
                met[
                    '%s, batch %d, training step with converter: %gx' % (method, n_batch, least)
                ] = ratio(found, FOLDED) >= least
        memory = methods[method]['adjacency of the set']
        met['%s, adjacency: 1/%d' % (method, ADJACENCY_BAR)] = (
            memory['sparse'] * ADJACENCY_BAR <= memory['padded dense']
        )
    return met


def table(methods):
    """Return results as lines of text."""
    lines = []
    for method, of in methods.items():
        lines.append(
            '%s: nodes %s; launches %s'
            % (
                method,
                {name: sum(counts.values()) for name, counts in of['nodes a step'].items()},
                {name: counts['kernels'] for name, counts in of.get('launches a step', {}).items()},
            )
        )
        for n_batch, found in of['batches'].items():
            for name, times in found['milliseconds'].items():
                lines.append(
                    '  batch %4s  %-17s %s; peak %.1f MB'
                    % (
                        n_batch,
                        name,
                        ', '.join(
                            '%s %.2f (%.2f) %.1fx (%.1fx)'
                            % (
                                kind,
                                times[kind]['with converter']['median'],
                                times[kind]['without']['median'],
                                ratio(found, name, kind),
                                ratio(found, name, kind, 'without'),
                            )
                            for kind in times
                        ),
                        found['peak_bytes'].get(name, 0) / 1e6,
                    )
                )
    return lines


def main(argv=None):
    args = subjects.step_argument_parser(
        __doc__, METHODS, BATCHES, SECONDS, '-1', '-1 (CPU) or the number of a GPU'
    ).parse_args(argv)
    device = harness.device_of(args.device)
    result: dict = {
        'method': 'Medians of interleaved rounds (low, high: 10th and 90th percentile); every '
        'round takes other molecules, the same for all; %d units, %d layers, float32, '
        'Adam; parts are host time, "forward" waits for the device because loss and '
        'metric are read' % (N_UNIT, N_LAYERS),
        'conditions': harness.step_conditions(args.commit, device),
        'data': {},
    }
    for name in args.data:
        smiles, labels, description = subjects.molecules(name, args)
        methods = {}
        result['data'][name] = {'description': description, 'methods': methods}
        for method in args.methods:
            dense, sparse = data_sets.of_method(smiles, labels, method)
            result['data'][name]['n_molecules'] = len(dense)
            methods[method] = run_method(method, dense, sparse, device, args.batches, args.seconds)
            print('\n'.join(table({method: methods[method]})), flush=True)
            # Saved after each method: an interrupted run keeps its results.
            path = harness.save('training', result, args.out)
        if name == 'tox21':
            result['bars_met'] = bars_met(methods, 'cpu' if device.xp is numpy else 'gpu')
            path = harness.save('training', result, args.out)
    for bar, is_met in result.get('bars_met', {}).items():
        print('%s: %s' % (bar, 'met' if is_met else 'MISSED'))
    print('wrote', path)


if __name__ == '__main__':
    main()
