"""How long must a captured step take at the least on this GPU, and how long does it take?

``python -m benchmarks.training.floors --tox21 tox21.csv.gz`` writes
``benchmarks/results/<gpu>/floors.json``: kernels and device time of a step from a DeviceDataset,
beside a floor = max(bytes / `BYTES_PER_S`, flops / `FLOP_PER_S`) + kernels * launch. With n rows,
z entries of the adjacency and g molecules in a batch (means over the data set), p parameters:

* bytes, 4 for each number, every array once for each time that something must read or write it:

  - features that one layer hands to the next, 5 n width: written and read; their gradient written
    and read; read again for the gradient of the parameters;
  - what a layer keeps inside for its gradient, 2 n width: GIN's hidden layer; GGNN's message, two
    gates and candidate. Dropout's draws, the sums over neighbours and the rectifier's masks are
    made again;
  - the adjacency, in every layer forward and backward: z columns, z values if there are any, n
    offsets;
  - atom ids twice, and labels;
  - 10 p: parameters read forward and backward, gradients written and read, parameters and both
    moments of Adam read and written;

* flops: 6 n in out for a matrix that is applied to rows (the product, the gradient of its input
  and of the matrix), with g for the head; 4 z width for a sum over neighbours and its gradient;
* launch: measured, microseconds from one to the next of empty kernels that wait for each other in
  a CUDA graph.

Arrays of small batches stay in the L2 cache, which is faster than memory: bytes count in large
batches, launches in small ones.
"""

import gc
import math

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
from chainer.backends import cuda

from benchmarks import harness
from benchmarks.training import bench_captured
from benchmarks.training import step_contenders
from benchmarks.training import subjects
from benchmarks.training.subjects import N_LAYERS, N_UNIT

FLOP_PER_S = 67e12  # NVIDIA's number for FP32 without tensor cores, H200
BYTES_PER_S = 4.3e12  # a copy of 8.6 GB there, bytes read and written

CONTENDERS = {'packed': step_contenders.PACKED, 'folded': step_contenders.ON_DEVICE}
WARM = 200  # steps: both sizes of batches have occurred, and their first checks are past
REPLAYS = 5
MOST = {'device_us': 90, 'kernels': 25}  # of RSGCN's step at batch 128, packed
EMPTY = 1000  # kernels in a graph, so that its own start does not count

ALIKE = (N_UNIT,) * (N_LAYERS + 1)
# Widths of the features that layers hand on, of the sums over neighbours, of what layers keep.
WIDTHS = {
    'rsgcn': (ALIKE, ALIKE[1:], ()),
    'gin': (ALIKE, ALIKE[1:], ALIKE[1:]),
    'nfp': (ALIKE, ALIKE[1:], ()),
    'ggnn': (ALIKE, ALIKE[1:], 4 * ALIKE[1:]),
    'relgcn': ((16, 128, 64), (16, 64), ()),
}


def work(method, shapes, n_rows, n_entries, n_graphs, n_labels, has_values):
    """Return the least bytes and flops of a step.

    Args:
        method (str): a key of `WIDTHS`.
        shapes (dict): path -> shape of the model's parameters.
        n_rows, n_entries (float): of the batch and of its adjacency.
        n_graphs, n_labels (int): molecules, and labels of each.
        has_values (bool): whether the adjacency has values other than 1.

    Returns:
        dict: 'bytes', 'flops'.
    """
    handed, summed, kept = WIDTHS[method]
    # GIN never uses that.
    sizes = {path: math.prod(of) for path, of in shapes.items() if '/first_mlp/' not in path}
    numbers = n_rows * (5 * sum(handed) + 2 * sum(kept))
    numbers += 2 * len(summed) * (n_entries * (1 + has_values) + n_rows)
    numbers += 2 * n_rows + n_graphs * n_labels + 10 * sum(sizes.values())
    flops = 4 * n_entries * sum(summed)
    for path, size in sizes.items():
        if not path.endswith('/W') or path.endswith('/embed/W'):
            continue
        n_times = n_rows if '/graph_conv/' in path else n_graphs
        if method == 'ggnn' and '/update_layers/' in path:
            n_times *= N_LAYERS  # which share it
        head, is_nfp, _ = path.rpartition('/graph_linears/')
        if is_nfp:  # each row has one of them, by its degree
            n_times /= sum(other.startswith(head) and other.endswith('/W') for other in sizes)
        flops += 6 * n_times * size
    return {'bytes': round(4 * numbers), 'flops': round(flops)}


def launch_us():
    """Return microseconds from one to the next of empty kernels in a CUDA graph."""
    from benchmarks.products import measure

    kernel = cuda.cupy.RawKernel('extern "C" __global__ void empty() {}', 'empty')
    graph = measure.capture(lambda: kernel((1,), (32,), ()), EMPTY)
    return measure.replay_times({'empty': (*graph, EMPTY)}, measure.ROUNDS)['empty']['median']


def measured(contender, device):
    """Return kernels and device microseconds of a replay.

    Returns:
        dict: 'kernels'; 'device_us', from one replay's start to the next one's; 'kernels_us', the
        sum of the kernels alone.
    """
    device_us = 1e3 * bench_captured.replay_ms(contender)

    def replay():
        for _ in range(REPLAYS):
            contender.replay()

    n_kernels, milliseconds = bench_captured.profiled(replay, device)
    return {
        'kernels': round(n_kernels / REPLAYS, 1),
        'device_us': round(device_us, 1),
        'kernels_us': round(1e3 * milliseconds / REPLAYS, 1),
    }


def floor_us(work, n_kernels, launch):
    """Return microseconds of bytes, flops and launches, and the floor that they make."""
    found = {
        'bytes_us': 1e6 * work['bytes'] / BYTES_PER_S,
        'flops_us': 1e6 * work['flops'] / FLOP_PER_S,
        'launches_us': n_kernels * launch,
    }
    found['floor_us'] = max(found['bytes_us'], found['flops_us']) + found['launches_us']
    return {name: round(us, 1) for name, us in found.items()}


def cell(method, model, dense, sparse, n_batch, device, launch):
    """Return layout -> what is measured and computed of a batch size."""
    makers = step_contenders.trainers(model, dense, sparse, n_batch, device)
    sizes, entries = (
        values[sparse.order] for values in (sparse.molecules.sizes, sparse.molecules.nnz)
    )
    shapes = {path: parameter.shape for path, parameter in model.namedparams()}
    found = {}
    for layout, name in CONTENDERS.items():
        trainer = makers[name]()
        trainer.warm(WARM)
        n_rows = n_batch * float(sizes.mean() + (layout == 'folded'))
        least = work(
            method,
            shapes,
            n_rows,
            n_batch * float(entries.mean()),
            n_batch,
            sparse.molecules.labels[0].shape[1],
            sparse.molecules.data is not None,
        )
        of = measured(trainer, device)
        found[layout] = {
            'rows': round(n_rows),
            **of,
            **least,
            **floor_us(least, of['kernels'], launch),
        }
        del trainer
        gc.collect()  # its graphs' memory
    return found


def bars(data):
    """Return {bar: {'value', 'met'}}."""
    found = {}
    for name, of_data in data.items():
        cell = of_data['methods'].get('rsgcn', {'batches': {}})['batches'].get('128')
        for key, most in MOST.items() if cell else ():
            value = cell['packed'][key]
            title = '%s rsgcn, batch 128, packed: %s at most %d' % (name, key, most)
            found[title] = {'value': value, 'met': value <= most}
    return found


def main(argv=None):
    parser = subjects.argument_parser(__doc__, subjects.FIVE, '0', 'number of a GPU')
    parser.add_argument('--data', nargs='+', default=['tox21'], choices=['tox21', 'qm9'])
    parser.add_argument('--batches', nargs='+', type=int, default=[32, 128, 1024])
    args = parser.parse_args(argv)
    device = harness.device_of(args.device)
    result = {
        'question': 'how far is the device time of a captured step from what it must take?',
        'method': ' '.join(__doc__.split('\n\n', 1)[1].split()),
        'conditions': harness.step_conditions(args.commit, device),
        'constants': {
            'flop_per_s': FLOP_PER_S,
            'bytes_per_s': BYTES_PER_S,
            'launch_us': launch_us(),
        },
        'data': {},
    }
    for data in args.data:
        *read, description = subjects.molecules(data, args)
        result['data'][data] = {'description': description, 'methods': {}}
        sets = {}
        for method in args.methods:
            dense, sparse = subjects.of_kind(sets, read, method)
            model = subjects.upstream_model(method, sparse.molecules.labels[0], [dense[0]])
            batches = result['data'][data]['methods'][method] = {'batches': {}}
            for n_batch in args.batches:
                launch = result['constants']['launch_us']
                try:
                    of = cell(method, model, dense, sparse, n_batch, device, launch)
                except Exception as error:  # the other cells are measured
                    batches.setdefault('not_run', {})[str(n_batch)] = repr(error)[:500]
                    print(data, method, n_batch, repr(error), flush=True)
                    continue
                batches['batches'][str(n_batch)] = of
                for layout, line in of.items():
                    print(data, method, n_batch, layout, line, flush=True)
                harness.save('floors', result, args.out)
    result['bars'] = bars(result['data'])
    harness.print_bars(result['bars'])
    print('wrote', harness.save('floors', result, args.out))


if __name__ == '__main__':
    main()
