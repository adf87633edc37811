"""How long does a molecule take from the data set to the batch, and how much memory does it hold?

Chainer Chemistry's ``concat_mols`` on its dense data set, against ours on the same dense data set
and on the sparse one. Needs no GPU:
``python -m benchmarks.training.bench_converter --data tox21.csv.gz`` writes
``benchmarks/results/cpu/converter.json``.
"""

import time

import chainer_bspmm
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
from chainer_chemistry.dataset.parsers import SmilesParser
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.datasets import NumpyTupleDataset
import numpy
import pandas
from rdkit import rdBase

from benchmarks import data_sets
from benchmarks import harness
from chainer_bspmm.dataset import from_smiles
from chainer_bspmm.dataset import to_sparse

METHODS = ('rsgcn', 'gin', 'relgcn', 'gnnfilm', 'rsgcn_gwm')
BATCHES = (32, 128, 1024)
ROUNDS = 15

UPSTREAM = 'upstream concat_mols'
DENSE = 'ours, dense data set'
SPARSE = 'ours, sparse data set'


def timed(call):
    """Return what a call returns, and its seconds."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def build(smiles, labels, method):
    """Return the dense and the sparse data set of a method, and the seconds that each way takes."""
    with rdBase.BlockLogs():
        result, upstream = timed(
            lambda: SmilesParser(preprocess_method_dict[method]()).parse(
                smiles, return_is_successful=True
            )
        )
    kept = numpy.flatnonzero(result['is_successful'])
    columns = result['dataset'].get_datasets()
    dense = NumpyTupleDataset(*columns, labels[kept])
    sparse, convert = timed(lambda: to_sparse(dense))
    direct, one = timed(lambda: from_smiles(smiles, method, labels, n_processes=1))
    _, parallel = timed(lambda: from_smiles(smiles, method, labels))
    if not (direct.kept == kept).all():
        raise AssertionError('%s: from_smiles keeps other molecules than upstream' % method)
    return (
        dense,
        sparse,
        direct.dataset,
        {
            'upstream parser': upstream,
            'to_sparse after it': convert,
            'from_smiles, 1 process': one,
            'from_smiles': parallel,
        },
    )


def check(dense, sparse, direct, index):
    """Raise AssertionError where the contenders make different batches."""
    examples = [dense[i] for i in index]
    expected = upstream_concat_mols(examples)
    padded = chainer_bspmm.CSRConverter('padded')
    for batch in (examples, [sparse[i] for i in index], sparse[index], direct[index]):
        atoms, adj, *labels = padded(batch)
        numpy.testing.assert_array_equal(atoms, expected[0])
        numpy.testing.assert_array_equal(adj.to_dense(), expected[1])
        for actual, label in zip(labels, expected[2:]):
            numpy.testing.assert_allclose(actual, label, rtol=1e-5)
        assert len(labels) == len(expected) - 2
    packed = [chainer_bspmm.concat_mols(batch) for batch in (examples, sparse[index])]
    for name in ('indptr', 'indices', 'row_offsets'):
        numpy.testing.assert_array_equal(*(getattr(batch[1], name) for batch in packed))


def measure(dense, sparse, n_batch, n_rounds):
    """Return name -> {'convert', 'fetch and convert'}: microseconds a molecule, interleaved.

    Every round takes other molecules, the same for all contenders. Fetching is what an iterator
    does: one example after the other. A contender's turn begins with an unmeasured batch:
    otherwise it would pay for the processor's caches, which the contender before it has filled.
    """
    rng = numpy.random.RandomState(0)
    contenders = {
        UPSTREAM: (dense, upstream_concat_mols),
        DENSE: (dense, chainer_bspmm.concat_mols),
        SPARSE: (sparse, chainer_bspmm.concat_mols),
    }
    times = {name: {'convert': [], 'fetch and convert': []} for name in contenders}
    # As many molecules for a small batch as for a large one, or a hiccup would count for more.
    n_calls = max(2048 // n_batch, 1)
    for _ in range(n_rounds):
        rounds = [rng.choice(len(dense), n_batch, replace=False) for _ in range(n_calls)]
        for name, (data_set, converter) in contenders.items():
            converter([data_set[i] for i in rounds[-1]])
            start = time.perf_counter()
            fetched = [[data_set[i] for i in index] for index in rounds]
            fetch = time.perf_counter() - start
            for batch in fetched:
                converter(batch)
            both = time.perf_counter() - start
            n = n_calls * n_batch / 1e6
            times[name]['convert'].append((both - fetch) / n)
            times[name]['fetch and convert'].append(both / n)
    return {
        name: {what: harness.summary(values) for what, values in columns.items()}
        for name, columns in times.items()
    }


def table(result):
    """Return the results as lines of text."""
    lines = []
    for method, found in result['methods'].items():
        used = found['memory']
        lines.append(
            '%s: adjacency %.1f MB padded dense, %.2f MB sparse: 1/%d; %s'
            % (
                method,
                used['padded dense'] / 1e6,
                used['sparse'] / 1e6,
                used['padded dense'] // used['sparse'],
                ', '.join('%s %.2f s' % item for item in found['seconds to build'].items()),
            )
        )
        for n_batch, times in found['microseconds a molecule'].items():
            base = times[UPSTREAM]
            for what in ('convert', 'fetch and convert'):
                lines.append(
                    '  batch %4s, %-17s: %s'
                    % (
                        n_batch,
                        what,
                        '; '.join(
                            '%s %.2f us (%.1fx)'
                            % (name, of[what]['median'], base[what]['median'] / of[what]['median'])
                            for name, of in times.items()
                        ),
                    )
                )
    return lines


def run(data, smiles_column, methods, n_rounds, limit, commit):
    frame = pandas.read_csv(data)[:limit]
    smiles = frame[smiles_column].tolist()
    labels = frame.select_dtypes('number').fillna(-1).to_numpy().astype('i')
    result = {
        'method': 'Median of %d rounds, interleaved, other molecules in every round, after one '
        'batch that is not measured; host only' % n_rounds,
        'conditions': harness.conditions(commit, data, len(smiles)),
        'methods': {},
    }
    for method in methods:
        dense, sparse, direct, seconds = build(smiles, labels, method)
        check(dense, sparse, direct, numpy.random.RandomState(1).permutation(len(dense))[:256])
        result['methods'][method] = {
            'memory': data_sets.adjacency_bytes(dense, sparse),
            'seconds to build': {name: round(value, 3) for name, value in seconds.items()},
            'microseconds a molecule': {
                str(n_batch): measure(dense, sparse, n_batch, n_rounds)
                for n_batch in BATCHES
                if n_batch <= len(dense)
            },
        }
    return result


def main(argv=None):
    parser = harness.argument_parser(__doc__)
    parser.add_argument(
        '--data',
        required=True,
        help='CSV file, plain or compressed, with SMILES '
        'and numeric columns of labels: Tox21 from MoleculeNet',
    )
    parser.add_argument('--smiles-column', default='smiles')
    parser.add_argument('--methods', nargs='+', default=METHODS, choices=sorted(METHODS))
    parser.add_argument('--rounds', type=int, default=ROUNDS)
    parser.add_argument('--limit', type=int, help='use only the first rows')
    args = parser.parse_args(argv)
    result = run(args.data, args.smiles_column, args.methods, args.rounds, args.limit, args.commit)
    print('\n'.join(table(result)))
    print('wrote', harness.save('converter', result, args.out))


if __name__ == '__main__':
    main()
