"""How fast is a captured step of every method that can be swapped, beside upstream's dense one?

Both with iterator and converter, on a GPU: ``python -m benchmarks.training.bench_methods --tox21
tox21.csv.gz`` writes ``benchmarks/results/<gpu>/methods.json`` after every method; ``--merge FILE``
keeps those of an earlier file that are not repeated.
"""

import collections
import copy
import gc
import json
import pathlib
import time

import chainer_bspmm
from chainer.backends import cuda
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
from chainer_chemistry.datasets import NumpyTupleDataset
import numpy

from benchmarks import data_sets
from benchmarks import harness
from benchmarks.training import bench_captured
from benchmarks.training import step_contenders
from benchmarks.training import subjects
from benchmarks.training.step_contenders import CAPTURED, EAGER, ON_DEVICE
from benchmarks.training.subjects import UPSTREAM
from chainer_bspmm.dataset import DeviceDataset
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.models import METHODS as NAMED
from chainer_bspmm.training import GraphUpdater

TARGETS = ('relgat', 'gnnfilm', 'ggnn_gwm', 'rsgcn_gwm', 'gin_gwm', 'nfp_gwm')
METHODS = (*TARGETS, 'mpnn', *(name for name in NAMED if name not in TARGETS))
OVER_UPSTREAM = 20  # of the targets, at least

BATCHES = (128, 32)  # the second where upstream has no memory for the first
SECONDS, TIME = 0.8, 150.0
WARM = {True: 150, False: 2}  # captured: past the checks of a layout's first replays

N_CHECKED = 16  # molecules
LOSS_ERROR, GRADIENT_ERROR = 1e-5, 1e-4  # float32 on both sides

# dense, data: the data set for upstream and ours; converter: ours; sizes: of the embeddings.
Subject = collections.namedtuple('Subject', 'dense data converter sizes')


def subject_of(method, read, sets):
    """Return the `Subject` of a method; `sets` keeps what several of them need."""
    base, _, variant = method.partition('_')
    base = {'mpnn': 'ggnn'}.get(base, base)
    if variant == 'gwm':
        base = method
    dense, sparse = subjects.of_kind(sets, read, base)
    folded = chainer_bspmm.CSRConverter('folded')
    if not variant.endswith('wle'):
        return Subject(dense, sparse, folded, {})
    with_atom = variant == 'wle'
    if with_atom not in sets:
        sets[with_atom] = data_sets.weisfeiler_lehman(dense, with_atom)
    found, n_labels = sets[with_atom]
    atoms, matrices, labels = dense.get_datasets()
    if with_atom:  # the labels are the atoms
        dense = NumpyTupleDataset(found, matrices, labels)
        return Subject(dense, to_sparse(dense), folded, {'n_atom_types': n_labels})
    dense = NumpyTupleDataset(atoms, matrices, found, labels)
    converter = chainer_bspmm.CSRConverter('folded', n_node_columns=1)
    return Subject(dense, dense, converter, {'n_wle_types': n_labels})


def check(model, swapped, subject, device):
    """Compare loss and gradients on one batch, without dropout.

    A gradient's error counts by the norm of all gradients together: some are 0 but for rounding.
    The captured steps are compared with eager ones by GraphUpdater itself.

    Raises:
        AssertionError: they differ.
    """
    index = numpy.random.RandomState(0).permutation(len(subject.dense))[:N_CHECKED]
    losses, gradients = [], []
    for of, converter, data in (
        (model, upstream_concat_mols, subject.dense),
        (swapped, subject.converter, subject.data),
    ):
        of = step_contenders.without_dropout(of)
        of.to_device(device)
        loss = of(*converter([data[i] for i in index], device))
        of.cleargrads()
        loss.backward()
        losses.append(float(loss.array))
        gradients.append(
            {path: cuda.to_cpu(p.grad) for path, p in of.namedparams() if p.grad is not None}
        )
    if device.xp is not numpy:
        cuda.cupy.get_default_memory_pool().free_all_blocks()  # those timed have others
    expected, found = gradients
    paths = sorted(expected)
    if paths != sorted(found):
        raise AssertionError('gradients of other parameters: %s' % (set(expected) ^ set(found)))
    flat = [numpy.concatenate([of[path].ravel() for path in paths]) for of in (found, expected)]
    errors = {
        'loss': abs(losses[1] - losses[0]) / abs(losses[0]),
        'gradients': harness.relative_error(*flat),
    }
    harness.gate({'loss': errors['loss']}, LOSS_ERROR)
    harness.gate(errors, GRADIENT_ERROR)
    return errors


def contenders(model, swapped, subject, n_batch, device):
    """Return name -> function that makes the `Trainer`, upstream's and the fastest of ours."""

    def make(kind, model, converter, data):
        return lambda: step_contenders.Trainer(kind, model, converter, data, n_batch, device)

    kind, name, data = GraphUpdater, ON_DEVICE, lambda: DeviceDataset(subject.data, device)
    if subject.data is subject.dense:
        name, data = CAPTURED, lambda: subject.data
    if not step_contenders.can_capture(device):
        kind, name, data = StandardUpdater, EAGER, lambda: subject.data
    return {
        UPSTREAM: make(StandardUpdater, model, upstream_concat_mols, lambda: subject.dense),
        name: make(kind, swapped, subject.converter, data),
    }


def measure(makers, device, seconds):
    """Return what is measured of a method at one batch size; without memory, the reason."""
    found = {}
    try:
        for name, make in makers.items():
            found[name] = make()
            found[name].run(WARM[found[name].is_captured])
            found[name].programs()
        milliseconds, n_rounds = bench_captured.measure_steps(found, device, seconds)
        ours = [name for name in found if name != UPSTREAM]
        for name in ours:
            if found[name].is_captured:
                device_ms = bench_captured.replay_ms(found[name])
                bench_captured.add_device_time(milliseconds[name], device_ms)
        return {
            'n_rounds': n_rounds,
            'milliseconds': milliseconds,
            'peak_bytes': {name: of.peak_bytes() for name, of in found.items()},
        }
    except out_of_memory() as error:
        return {'not_run': 'out of memory: ' + bench_captured.described(error)}
    finally:
        # Upstream's largest arrays take most of the device, and the next method needs them.
        trainers = list(found.values())
        found.clear()
        gc.collect()
        for trainer in trainers:
            trainer.free()


def out_of_memory():
    return (
        MemoryError if not cuda.available else (MemoryError, cuda.cupy.cuda.memory.OutOfMemoryError)
    )


def ratio(cell):
    """Return upstream's median time over ours."""
    upstream, ours = cell['milliseconds'].values()
    return upstream['wall']['median'] / ours['wall']['median']


def run_method(method, read, sets, device, batches, seconds):
    """Return what is stored of a method."""
    subject = subject_of(method, read, sets)
    labels = subject.dense.get_datasets()[-1]
    model = subjects.upstream_model(method, labels, [subject.dense[0]], **subject.sizes)
    swapped = chainer_bspmm.sparsify(copy.deepcopy(model))
    result = {'relative_errors': check(model, swapped, subject, device), 'batches': {}}
    for n_batch in batches:
        makers = contenders(model, swapped, subject, n_batch, device)
        cell = result['batches'][str(n_batch)] = measure(makers, device, seconds)
        if 'not_run' not in cell:
            cell['over upstream'] = round(ratio(cell), 2)
            break
    return result


def line(method, of):
    """Return the result of a method as a line of text."""
    if 'wrong' in of:
        return '%-12s %s' % (method, of['wrong'])
    cells = []
    for n_batch, cell in of['batches'].items():
        if 'not_run' in cell:
            cells.append('batch %s %s' % (n_batch, cell['not_run']))
            continue
        times = [
            '%s %.3f' % (name, t['wall']['median']) for name, t in cell['milliseconds'].items()
        ]
        cells.append('batch %s %s: %.1fx' % (n_batch, ', '.join(times), cell['over upstream']))
    return '%-12s %s' % (method, '; '.join(cells))


def bars(methods):
    """Return {target: {'ratio', 'met'}}, at the largest batch that was run."""
    found = {}
    for method in TARGETS:
        if method in methods:
            cells = list(methods[method].get('batches', {}).values())
            times = cells[-1].get('over upstream') if cells else None
            found[method] = {'ratio': times, 'met': times is not None and times >= OVER_UPSTREAM}
    return found


def run(args, device):
    """Measure the methods, the targets first; the file is written after every one."""
    start = time.perf_counter()
    *read, description = data_sets.tox21(args.tox21, args.limit)
    stored = {}
    if args.merge:
        stored = json.loads(pathlib.Path(args.merge).read_text())['methods']
    result = {
        'question': 'milliseconds of a training step, captured and folded, and upstream dense: '
        'iterator, converter, forward, backward, Adam',
        'method': 'Medians of interleaved rounds (low, high: 10th and 90th percentile) of turns of '
        'several steps, waited for after the last; the fastest data set that a method can have: '
        'DeviceDataset, for cwle and gwle a list of dense examples; %d units, %d layers, float32'
        % (subjects.N_UNIT, subjects.N_LAYERS),
        'conditions': harness.step_conditions(args.commit, device),
        'data': description,
    }
    sets, not_run, path = {}, [], None
    for method in args.methods:
        if time.perf_counter() - start > args.time:
            not_run.append(method)
            continue
        try:
            found = run_method(method, read, sets, device, args.batches, args.seconds)
        except Exception as error:  # the other methods are measured; the run fails at its end
            found = {'wrong': bench_captured.described(error)}
        stored[method] = found
        print('%4.0f s, %s' % (time.perf_counter() - start, line(method, found)), flush=True)
        methods = {name: stored[name] for name in METHODS if name in stored}
        result.update(not_run=not_run, bars=bars(methods), methods=methods)
        path = harness.save('methods', result, args.out)
    for method, of in result.get('bars', {}).items():
        print('%s, at least %gx: %s' % (method, OVER_UPSTREAM, 'met' if of['met'] else 'MISSED'))
    print('not run for lack of time:', not_run or 'nothing')
    print('%.0f s in all; wrote %s' % (time.perf_counter() - start, path))
    if any('wrong' in of for of in stored.values()):
        raise SystemExit('not all methods were measured')


def main(argv=None):
    parser = subjects.argument_parser(__doc__, METHODS, '0', 'number of a GPU; -1: CPU, eager')
    parser.add_argument('--batches', nargs='+', type=int, default=BATCHES)
    parser.add_argument('--seconds', type=float, default=SECONDS, help='for each method')
    parser.add_argument('--time', type=float, default=TIME, help='seconds; the rest is skipped')
    parser.add_argument('--merge', metavar='FILE', help='keep the methods of this file')
    args = parser.parse_args(argv)
    run(args, harness.device_of(args.device))


if __name__ == '__main__':
    main()
