"""How many molecules per second can be screened: upstream's predict, ours eager, ours captured?

And what RDKit takes of the time from SMILES.

``python -m benchmarks.training.bench_screening --device 0 --tox21 tox21.csv.gz`` on a GPU, without
``--device`` on the CPU; writes ``benchmarks/results/<gpu or cpu>/screening.json``.
"""

import concurrent.futures
import copy
import multiprocessing
import os
import time
import warnings

import chainer_bspmm
from chainer import functions
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
from chainer_chemistry.dataset.parsers import SmilesParser
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.datasets import NumpyTupleDataset
from chainer_chemistry.models.prediction import Classifier
import numpy
from rdkit import Chem
from rdkit import rdBase

from benchmarks import data_sets
from benchmarks import harness
from benchmarks.training import subjects
from benchmarks.training.subjects import FIVE, N_LAYERS, N_UNIT, UPSTREAM
from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.dataset import DeviceDataset
from chainer_bspmm.dataset import from_smiles
from chainer_bspmm.training import captured_predict

LIMIT = 1024  # different molecules of a data set
MOLECULES = 131072  # of a pass, the different ones over and over
PARSED = 262144  # of a pass with parsing: starting the processes must not decide
PARSED_ALONE = 4096  # molecules whose parsing on one core is timed
DENSE = 2048  # of a pass of upstream's: it takes longest
BATCH = 1024
ROUNDS = 3
WARM_UP = 20  # batches: one eager, one captured, each of the first sixteen replays checked
ERROR = 1e-5  # relative, float32 on both sides
PACKED = CSRConverter('packed')  # a molecule's own answer, whatever batch it is in

EAGER, CAPTURED = 'ours eager', 'ours captured'
ON_DEVICE, STEADY = 'ours captured, DeviceDataset', ', once captured'
ALONE, ALL_CORES = ', one process', ', a process on every core'


def predict(model, data, converter, n_batch):
    """Predict as upstream does, eagerly."""

    def inputs(batch, device=None):
        return tuple(converter(batch, device)[:2])  # without labels

    if isinstance(model, Classifier):
        return model.predict_proba(data, n_batch, inputs, postprocess_fn=functions.sigmoid)
    return model.predict(data, n_batch, inputs)


def capture(model, data, n_batch, **kwargs):
    """Return predictions, and molecules a second after the first few batches (None: too few)."""
    fn = functions.sigmoid if isinstance(model, Classifier) else None
    values, clock = [], []
    for found in captured_predict(
        model, data, batch_size=n_batch, postprocess_fn=fn, converter=PACKED, **kwargs
    ):
        values.append(found.values)
        clock.append(time.perf_counter())
    n = sum(map(len, values[WARM_UP:]))
    return numpy.concatenate(values), n / (clock[-1] - clock[WARM_UP - 1]) if n else None


def parse(smiles, method):
    """Return upstream's dense data set."""
    with rdBase.BlockLogs():
        return SmilesParser(preprocess_method_dict[method]()).parse(smiles)['dataset']


def rdkit_alone(smiles):
    """Make RDKit's calls for the molecules of SMILES, those of upstream's preprocessors."""
    with rdBase.BlockLogs():
        for text in smiles:
            mol = Chem.MolFromSmiles(text)
            if mol is not None:
                Chem.MolFromSmiles(Chem.MolToSmiles(mol, isomericSmiles=False, canonical=True))


def parse_ours(smiles, method):
    """Return our data set, parsed in this process."""
    return from_smiles(smiles, method, n_processes=1)


def parsing_cost(smiles, method, n_rounds):
    """Return microseconds that a molecule takes: RDKit's calls, and all of ours.

    Of one process alone and, where each core has one, of all at the same time, a core's: they share
    caches, memory and clock.
    """
    texts = [smiles[i] for i in repeated(len(smiles), PARSED_ALONE)]
    n_cores = len(os.sched_getaffinity(0))
    calls = {'RDKit': (rdkit_alone, (texts,)), 'from_smiles': (parse_ours, (texts, method))}
    found = {}
    with concurrent.futures.ProcessPoolExecutor(
        n_cores, multiprocessing.get_context('forkserver')
    ) as pool:
        for round_ in range(1 + n_rounds):  # the first starts the processes
            for name, call in calls.items():
                alone = pool.submit(seconds_of, *call).result()
                all_at_once = [pool.submit(seconds_of, *call) for _ in range(n_cores)]
                together = numpy.mean([future.result() for future in all_at_once])
                if round_:
                    found.setdefault(name + ALONE, []).append(alone)
                    found.setdefault(name + ALL_CORES, []).append(together)
    return {
        name: harness.summary([1e6 * seconds / len(texts) for seconds in values])
        for name, values in found.items()
    }


def seconds_of(call, arguments):
    """Return how long a call takes."""
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def repeated(n, total):
    """Return `total` positions: all of n over and over."""
    return numpy.resize(numpy.arange(n), total)


def contenders(method, smiles, labels, device, n_batch, totals):
    """Return {'without parsing', 'with parsing': name -> (function, molecules of a pass)}.

    Raises:
        AssertionError: predictions differ: ours of a batch from upstream's of molecules alone.
    """
    dense = parse(smiles, method)
    sparse = from_smiles(smiles, method).dataset
    if len(dense) != len(sparse):
        raise AssertionError('%s: from_smiles keeps other molecules than upstream' % method)
    dense = NumpyTupleDataset(*dense.get_datasets())
    upstream = subjects.upstream_model(method, labels, [(*dense[0], labels[0])])
    swapped = chainer_bspmm.sparsify(copy.deepcopy(upstream))
    for model in (upstream, swapped):
        model.to_device(device)

    few = sparse[repeated(len(sparse), 5 * n_batch)]  # some of them replayed
    found, _ = capture(swapped, few, n_batch)
    alone = predict(
        upstream, [dense[i] for i in range(min(16, len(dense)))], upstream_concat_mols, 1
    )
    eager = predict(swapped, few, PACKED, n_batch)
    texts = [smiles[i] for i in repeated(len(smiles), 5 * n_batch)]
    parsed, _ = capture(swapped, texts, n_batch, method=method)
    errors = {
        'alone': harness.relative_error(found[: len(alone)], alone),
        'eager': harness.relative_error(found, eager),
        'parsed': harness.relative_error(
            parsed, predict(swapped, from_smiles(texts, method).dataset, PACKED, n_batch)
        ),
    }
    on_device = None
    if device.xp is not numpy:
        on_device = DeviceDataset(sparse, device)
        errors['on device'] = harness.relative_error(
            capture(swapped, on_device[few.order], n_batch)[0], eager
        )
    harness.gate(errors, ERROR)

    n_dense, n_sparse, n_parsed = totals
    much = [dense[i] for i in repeated(len(dense), n_dense)]
    order = repeated(len(sparse), n_sparse)
    texts = [smiles[i] for i in repeated(len(smiles), n_parsed)]
    few_texts = texts[:n_dense]
    plain = {
        UPSTREAM: (lambda: predict(upstream, much, upstream_concat_mols, n_batch), n_dense),
        EAGER: (lambda: predict(swapped, sparse[order], PACKED, n_batch), n_sparse),
        CAPTURED: (lambda: capture(swapped, sparse[order], n_batch), n_sparse),
    }
    if on_device is not None:
        plain[ON_DEVICE] = lambda: capture(swapped, on_device[order], n_batch), n_sparse
    return {
        'without parsing': plain,
        'with parsing': {
            UPSTREAM: (
                lambda: predict(upstream, parse(few_texts, method), upstream_concat_mols, n_batch),
                len(few_texts),
            ),
            EAGER: (
                lambda: predict(swapped, from_smiles(texts, method).dataset, PACKED, n_batch),
                n_parsed,
            ),
            CAPTURED: (lambda: capture(swapped, texts, n_batch, method=method), n_parsed),
        },
    }, errors


def measure(found, n_rounds):
    """Return name -> summary of molecules a second, of whole passes, interleaved.

    Of captured ones there is a second entry, for what comes after the graphs are captured. The
    first round is not measured, but for passes that parse, which take long.
    """
    rates = {}
    for round_ in range(n_rounds):
        for name, (call, n) in found.items():
            start = time.perf_counter()
            result = call()
            seconds = time.perf_counter() - start
            if round_ == 0 and n_rounds > 1:
                continue
            rates.setdefault(name, []).append(n / seconds)
            if isinstance(result, tuple) and result[1] is not None:
                rates.setdefault(name + STEADY, []).append(result[1])
    return {name: harness.summary(values) for name, values in rates.items()}


def table(method, found):
    """Return results as lines of text."""
    lines = ['%s: relative errors %s' % (method, found['relative_errors'])]
    for what, rates in found['molecules a second'].items():
        base = rates[UPSTREAM]['median']
        lines += [
            '  %-16s %-44s %11.0f molecules/s %8.1fx'
            % (what, name, of['median'], of['median'] / base)
            for name, of in rates.items()
        ]
    cost = found['microseconds of a core to parse a molecule']
    lines += ['  %-61s %11.1f us a molecule' % (name, of['median']) for name, of in cost.items()]
    return lines


def main(argv=None):
    parser = subjects.argument_parser(__doc__, FIVE, '-1', '-1 (CPU) or the number of a GPU')
    parser.set_defaults(limit=LIMIT)
    parser.add_argument('--batch', type=int, default=BATCH)
    parser.add_argument(
        '--totals',
        type=int,
        nargs=3,
        default=(DENSE, MOLECULES, PARSED),
        help='molecules of a pass: of upstream, ours, ours with parsing',
    )
    parser.add_argument('--rounds', type=int, default=ROUNDS, help='after one to warm up')
    args = parser.parse_args(argv)
    device = harness.device_of(args.device)
    warnings.filterwarnings('error', 'captured_predict predicts eagerly')
    result = {
        'method': 'Molecules a second of whole passes, medians of %d interleaved rounds (low, '
        'high: 10th and 90th percentile), with parsing of 1; %d different molecules over '
        'and over; batch %d, %d units, %d layers, float32; upstream predicts %d, ours '
        '%d, with parsing %d a pass; captured passes include capture and checks, but '
        'for "%s"'
        % (args.rounds, args.limit, args.batch, N_UNIT, N_LAYERS, *args.totals, STEADY.strip(', ')),
        'conditions': harness.step_conditions(args.commit, device),
        'n_cores': len(os.sched_getaffinity(0)),
        'data': {},
    }
    sets = {'qm9': data_sets.qm9(args.limit)}
    if args.tox21:
        sets['tox21'] = data_sets.tox21(args.tox21, args.limit)
    for name, (smiles, labels, description) in sets.items():
        methods = {}
        result['data'][name] = {
            'description': description,
            'n_molecules': len(smiles),
            'methods': methods,
        }
        for method in args.methods:
            found, errors = contenders(method, smiles, labels, device, args.batch, args.totals)
            methods[method] = {
                'relative_errors': errors,
                'microseconds of a core to parse a molecule': parsing_cost(
                    smiles, method, args.rounds
                ),
                'molecules a second': {
                    'without parsing': measure(found['without parsing'], 1 + args.rounds),
                    'with parsing': measure(found['with parsing'], 1),
                },
            }
            print('\n'.join(table(method, methods[method])), flush=True)
            # Saved after each method: an interrupted run keeps its results.
            path = harness.save('screening', result, args.out)
    print('wrote', path)


if __name__ == '__main__':
    main()
