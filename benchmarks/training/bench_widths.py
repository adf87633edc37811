"""How long does a training step take at widths of 16 to 512 units, in FP32 and in TF32?

``python -m benchmarks.training.bench_widths --tox21 tox21.csv.gz`` on a GPU times captured steps of
five models, packed, from a `DeviceDataset`, beside upstream's dense steps and, for three of the
models, JAX's. All are in FP32 and in TF32. The floor of a cell is the time of the step's matrix
products alone, by cuBLAS. With ``--gpus 2`` two models are measured at the same time, each on a GPU
and half of the processors. It writes ``benchmarks/results/<gpu or cpu>/widths.json``, or with
``--data nci`` ``widths_nci.json``.
"""

import contextlib
import importlib.util
import itertools
import json
import pathlib
import sys
import time

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer.functions.connection.linear import LinearFunction
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
from chainer_chemistry.links import GGNNUpdate
import numpy

from benchmarks import gpus, harness
from benchmarks.training import bench_steps, step_contenders, subjects
from benchmarks.training.step_contenders import EAGER_PACKED, PACKED, PRECISIONS
from benchmarks.training.step_contenders import UPSTREAM
from chainer_bspmm.cuda import gemm
from chainer_bspmm.training.cuda_graphs import Capturer

# The most important widths come first, in case a run ends before all are measured.
UNITS = 256, 64, 512, 128, 16
BATCHES = 128, 1024, 32
TIME, SECONDS = 500.0, 0.8
# Batch -> steps before the timed ones, by which most forms have passed the checks of their first
# replays, each of which takes as long as an eager step. Large batches have long steps and one form.
WARM = {1024: 600}
# Least ratios of JAX's time to ours: in every cell, and in the geometric mean of all cells.
OVER_JAX = {'FP32': (1.05, 1.3), 'TF32': (1.0, 1.25)}
# (precision, batch) -> largest ratio of a step's device time to the time of its products alone, for
# layers of at least WIDE units.
WIDE = 256
OVER_PRODUCTS = {('FP32', 1024): 1.35, ('TF32', 1024): 2.0, ('FP32', 128): 1.7, ('TF32', 128): 2.5}
OURS = {'FP32': PACKED, 'TF32': PACKED + ', TF32'}
UPSTREAM_S = {'FP32': UPSTREAM, 'TF32': UPSTREAM + ', TF32'}
TRAINERS = {'FP32': step_contenders.Trainer, 'TF32': step_contenders.InTF32}
MULTIPLYING = {'FP32': contextlib.nullcontext, 'TF32': step_contenders.tf32}
METHOD = bench_steps.METHOD.replace(
    '%d units, %d layers, ' % (subjects.N_UNIT, subjects.N_LAYERS), ''
) + (
    'Ours: packed, from a DeviceDataset. TF32: with CUPY_TF32=1. products: the matrix products of '
    'forward and backward in one CUDA graph, by cublasGemmEx at the same precision, on the rows '
    'that they need (NFP: those of each degree); products with the same input are one, and weights '
    'with the same input whose results are added are one weight; sums over neighbours are not '
    'included. %s' % bench_steps.STUDIES['jax'].method
)


class _Products(chainer.FunctionHook):
    """Hook that notes the input and the number of outputs of each linear function.

    `left_out`: weights whose products are not noted.
    """

    def __init__(self, left_out):
        self._left_out = left_out
        self.found = []

    def forward_preprocess(self, function, in_data):
        if isinstance(function, LinearFunction):
            x, W = in_data[:2]
            if not any(W is each for each in self._left_out):
                self.found.append((x, len(W)))


def weights_that_are_summed(model):
    """Return weights of GGNN's updates that need no products: the state is also the input there.

    U_z and U_r have the input of W_z and W_r, so the products are those of W_z + U_z and W_r + U_r.
    """
    updates = [link for link in model.links() if isinstance(link, GGNNUpdate)]
    grus = [link.update_layer for link in updates]
    return [layer.W.array for gru in grus for layer in (gru.U_z, gru.U_r)]


def products_of(subject, n_batch):
    """Return the products of a step's forward pass for a mean batch: (rows, inputs, outputs).

    They are counted in upstream's model on a batch of molecules of one size, which has no padding.
    Upstream's NFP multiplies all atoms by the matrix of every degree, with zeros for other atoms.
    Products that only upstream computes are left out.
    """
    index = step_contenders.equal_sizes(subject.dense)
    examples = [subject.dense[int(i)] for i in index]
    *inputs, _ = upstream_concat_mols(examples)
    hook = _Products(weights_that_are_summed(subject.model))
    with chainer.using_config('train', False), chainer.no_backprop_mode(), hook:
        subject.model.predictor(*inputs)
    n_atoms = len(index) * len(examples[0][0])
    n_atoms_of_batch = n_batch * numpy.mean([len(atoms) for atoms, *_ in subject.dense])
    inputs, outputs = {}, {}
    for x, n_outputs in hook.found:  # the hook keeps the arrays, so that addresses differ
        address = x.__array_interface__['data'][0]
        inputs[address] = x
        outputs[address] = outputs.get(address, 0) + n_outputs
    found = []
    for address, x in inputs.items():
        share = numpy.count_nonzero(x.any(axis=1)) / len(x)
        n_rows = round(share * (n_atoms_of_batch if len(x) == n_atoms else n_batch))
        if n_rows:
            found.append((n_rows, x.shape[1], outputs[address]))
    return found


def products_ms(products, precision, device):
    """Return the device milliseconds of products and their gradients, by a captured graph."""
    xp = device.xp
    generator = xp.random.RandomState(0)
    capturer = Capturer(device)
    with capturer.stream:
        blas = gemm.Blas()
    factors = []
    for n_rows, n_inputs, n_outputs in products:
        shapes = (n_rows, n_inputs), (n_outputs, n_inputs), (n_rows, n_outputs)
        factors.append([generator.standard_normal(shape).astype('f') for shape in shapes])

    def multiply():
        for x, W, gy in factors:
            blas.dot(x, W.T)
            blas.dot(gy, W)
            blas.dot(gy.T, x)

    with MULTIPLYING[precision]():
        launch, _ = capturer.capture(multiply)
    return bench_steps.replay_ms(launch)


def contenders(subject, n_batch, device):
    """Return name -> function that makes the contender, for all contenders in Chainer."""
    if not step_contenders.can_capture(device):
        makers = step_contenders.trainers(subject, n_batch, device)
        return {name: makers[name] for name in (UPSTREAM, EAGER_PACKED)}
    found = {}
    for precision, trainer in TRAINERS.items():
        makers = step_contenders.trainers(subject, n_batch, device, trainer)
        found[UPSTREAM_S[precision]] = makers[UPSTREAM]
        found[OURS[precision]] = makers[PACKED]
    return found


def has_jax(method):
    return method in bench_steps.STUDIES['jax'].methods and importlib.util.find_spec('jax')


def check(method, subject, device):
    """Return the relative errors of a step of ours; AssertionError if one is large."""
    subject = subject._replace(model=step_contenders.without_dropout(subject.model))
    index = step_contenders.equal_sizes(subject.dense)
    changes = step_contenders.changes_of(subject, index, [UPSTREAM], device)
    if step_contenders.can_capture(device):
        for precision, trainer in TRAINERS.items():
            found = step_contenders.changes_of(subject, index, [PACKED], device, trainer)
            changes[OURS[precision]] = found[PACKED]
        limit = step_contenders.TF32_ERROR
        errors = step_contenders.judged(
            {name: changes[name] for name in (UPSTREAM, OURS['TF32'])}, UPSTREAM, limit
        )
    else:
        found = step_contenders.changes_of(subject, index, [EAGER_PACKED], device)
        changes[EAGER_PACKED] = found[EAGER_PACKED]
        errors = {}
    changes.pop(OURS['TF32'], None)
    errors.update(step_contenders.judged(changes, UPSTREAM))
    return errors


def cells(data):
    """Yield ((units, method, batch), cell), narrow layers first, then small batches of a method."""
    for units, methods in sorted(data.items(), key=lambda item: int(item[0])):
        for method, of in methods.items():
            for n_batch, cell in sorted(of['batches'].items(), key=lambda item: int(item[0])):
                yield (units, method, n_batch), cell


def over_products(cell, precision):
    """Return the device time of our step over its products', or None if one is missing."""
    times = cell['milliseconds'].get(OURS[precision], {})
    if 'device' not in times or precision not in cell['products']:
        return None
    return times['device'] / cell['products'][precision]


def bars(data):
    """Return {bar: {'value', 'met'}} for the cells that were measured."""
    found = {}
    means = {precision: [] for precision in PRECISIONS}
    for units, methods in data.items():
        for method, of in methods.items():
            for (n_batch, cell), precision in itertools.product(of['batches'].items(), PRECISIONS):
                title = '%s units, %s, batch %s, %s: ' % (units, method, n_batch, precision)
                over = step_contenders.over_jax(cell, precision, OURS[precision])
                if over is not None and int(units) >= subjects.N_UNIT:
                    means[precision].append(over)
                    least, _ = OVER_JAX[precision]
                    bar = '%s%gx as fast as JAX' % (title, least)
                    found[bar] = harness.bar(over, over >= least)
                most = OVER_PRODUCTS.get((precision, int(n_batch)))
                over = over_products(cell, precision)
                if over is not None and most is not None and int(units) >= WIDE:
                    bar = '%sat most %gx the time of its products' % (title, most)
                    found[bar] = harness.bar(over, over <= most)
    for precision, ratios in means.items():
        if ratios:
            _, least = OVER_JAX[precision]
            mean = float(numpy.exp(numpy.mean(numpy.log(ratios))))
            bar = 'geometric mean, %s: %gx as fast as JAX' % (precision, least)
            found[bar] = harness.bar(mean, mean >= least)
    return found


def result_name(data):
    """Return the name of a result on a data set."""
    return 'widths' if data == 'tox21' else 'widths_' + data


def measure(subject, n_batch, peers, seconds, device):
    """Return the times of a cell and its products; `peers`: name -> function that makes a peer."""
    makers = {**contenders(subject, n_batch, device), **peers}
    cell = bench_steps.run_cell(makers, WARM.get(n_batch, step_contenders.WARM_CAPTURED), seconds)
    products = cell['product_sizes'] = products_of(subject, n_batch)
    cell['products'] = {}
    if step_contenders.can_capture(device):
        cell['products'] = {
            precision: round(products_ms(products, precision, device), 4) for precision in TRAINERS
        }
    return cell


def run(args, device):
    """Measure missing cells, the most important first; the file is written after every one."""
    start = time.perf_counter()
    *read, description = subjects.molecules(args.data, args)
    head = {
        'question': 'milliseconds of a training step by the width of the layers, in FP32 and TF32',
        'method': METHOD,
        'conditions': harness.step_conditions(args.commit, device),
        'options': {
            'data': args.data,
            'layers': args.layers,
            'limit': args.limit,
            'seconds': args.seconds,
            'tox21': 'a file' if args.tox21 else 'generated',
        },
        'description': description,
    }
    name = result_name(args.data)
    result = harness.resumed(name, head, args.out)
    data = result.setdefault('data', {})
    result['not_run'] = []
    sets = {}
    for n_unit, method in itertools.product(args.units, args.methods):
        of = data.setdefault(str(n_unit), {}).setdefault(method, {'batches': {}})
        missing = [n_batch for n_batch in args.batches if str(n_batch) not in of['batches']]
        if not missing:
            continue
        if time.perf_counter() - start > args.time:
            title = '%d units, %s, batches %s' % (n_unit, method, ', '.join(map(str, missing)))
            result['not_run'].append(title)
            continue
        subject = subjects.subject_of(method, read, sets, n_unit, args.layers)
        missing = [n_batch for n_batch in missing if n_batch <= len(subject.dense)]
        of['relative_errors'] = check(method, subject, device)
        peers = dict.fromkeys(missing, {})
        if has_jax(method):
            try:
                errors = step_contenders.check_jax(method, subject, device)
            except AssertionError as error:
                of['not_run'] = {'JAX': str(error)}
                print('%d units, %s, JAX not run: %s' % (n_unit, method, error), flush=True)
            else:
                of['relative_errors'].update(errors)
                # XLA takes seconds for each batch, so it compiles for all of them at once.
                peers = step_contenders.jax_peers(method, subject, missing, device)
        for n_batch in missing:
            of['batches'][str(n_batch)] = measure(
                subject, n_batch, peers[n_batch], args.seconds, device
            )
            title = '%d units, %s, batch %d' % (n_unit, method, n_batch)
            print('\n'.join(bench_steps.table(title, of['batches'][str(n_batch)])), flush=True)
            result['bars'] = bars(data)
            harness.save(name, result, args.out)
    finish(result, args, start)


def run_on_several(argv, args):
    """Measure each method in a process of its own, on one of several GPUs; join the results."""
    start = time.perf_counter()
    parts = pathlib.Path(args.out or harness.ROOT / '.cache') / 'widths'

    def call(method, place):
        mine = '--gpus', '1', '--methods', method, '--out', str(parts / method)
        command = [sys.executable, '-m', 'benchmarks.training.bench_widths', *argv, *mine]
        if place.run(command):
            raise SystemExit('%s ended with an error' % method)
        return json.loads((parts / method / (result_name(args.data) + '.json')).read_text())

    result, *others = gpus.spread(args.methods, args.gpus, call)
    for other in others:
        for n_unit, methods in other['data'].items():
            result['data'].setdefault(n_unit, {}).update(methods)
        result['not_run'] += other['not_run']
    result['options'].update(
        {'gpus': args.gpus, 'cpus of each': len(gpus.places(args.gpus)[0].cpus)}
    )
    finish(result, args, start)


def finish(result, args, start):
    """Judge and store a result, and print what it lacks; `start`: when the benchmark began."""
    result['bars'] = bars(result['data'])
    harness.print_bars(result['bars'])
    path = harness.save(result_name(args.data), result, args.out)
    print('not run for lack of time:', result['not_run'] or 'nothing')
    print('%.0f s in all; wrote %s' % (time.perf_counter() - start, path))


def main(argv=None):
    parser = subjects.argument_parser(
        __doc__, subjects.FIVE, '0', 'number of a GPU; -1 (CPU) captures nothing'
    )
    parser.add_argument('--data', choices=['tox21', 'qm9', 'nci'], default='tox21')
    parser.add_argument('--units', nargs='+', type=int, default=UNITS)
    parser.add_argument('--layers', type=int, default=subjects.N_LAYERS)
    parser.add_argument('--batches', nargs='+', type=int, default=BATCHES)
    parser.add_argument(
        '--seconds', type=float, default=SECONDS, help='of the rounds of each cell, at least'
    )
    parser.add_argument('--gpus', type=int, default=1, help='number of GPUs; each takes methods')
    subjects.add_time(parser, TIME)
    args = parser.parse_args(argv)
    if args.gpus > 1:
        run_on_several(sys.argv[1:] if argv is None else argv, args)
    else:
        run(args, harness.device_of(args.device))


if __name__ == '__main__':
    main()
