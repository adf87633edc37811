"""How does a training step scale over ranks, and what would it be on more GPUs than there are?

``python -m benchmarks.training.bench_scaling --tox21 tox21.csv.gz --ranks 1 2`` starts itself under
mpirun for every number of ranks, each with a GPU of this host, captured steps from a part of the
data set on it; with ``--device -1`` eager steps on the CPU. Writes
``benchmarks/results/<gpu or cpu>/scaling.json``.

Weak scaling: every rank has batches of the same size. One rank trains without MPI.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import chainer_bspmm
import chainer
from chainer.training.updaters import StandardUpdater
import numpy

from benchmarks import harness
from benchmarks.training import step_contenders
from benchmarks.training import subjects
from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.dataset import DeviceDataset
from chainer_bspmm.training import GraphUpdater

BATCHES = 128, 1024
EFFICIENCIES = {128: 0.93, 1024: 0.97}  # batch of a rank -> of two ranks, at least
TURN, MIN_STEPS, MAX_STEPS = 0.1, 4, 500  # seconds, and steps, between two barriers
ROUNDS = 15
WARM = 2000  # steps: most are past the checks of their first 1,024 replays
N_SUMS = 200
MODELLED = 8, 64, 512  # GPUs
GPUS_A_HOST = 8
LINKS = {
    'GB/s between GPUs of a host': 150.0,
    'GB/s between hosts, of a GPU': 25.0,
    'us between hosts': 5.0,
}


def worker(args):
    """Measure on this rank; the first one writes what all found."""
    comm = None
    if args.communicator:
        import chainermn

        comm = chainermn.create_communicator(args.communicator)
    on_gpu = args.device != '-1'
    device = harness.device_of(str(comm.intra_rank if comm and on_gpu else args.device))
    *read, description = subjects.molecules('tox21', args)
    sets, found = {}, {}
    for method in args.methods:
        dense, sparse = subjects.of_kind(sets, read, method)
        model = subjects.upstream_model(method, sparse.molecules.labels[0], [dense[0]])
        model = chainer_bspmm.sparsify(model)
        for n_batch in args.batches:
            cell = found.setdefault(method, {})
            cell[str(n_batch)] = measure(model, sparse, n_batch, device, comm, args.rounds)
    if comm is None or comm.rank == 0:
        result = {'methods': found, 'description': description}
        pathlib.Path(args.worker).write_text(json.dumps(result))


def measure(model, sparse, n_batch, device, comm, n_rounds):
    """Return the milliseconds of a step of all ranks, and of the sum alone where NCCL is there."""
    on_gpu = device.xp is not numpy
    optimizer = chainer.optimizers.Adam()
    if comm is not None:
        import chainermn

        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
        sparse = chainermn.scatter_dataset(sparse if comm.rank == 0 else None, comm)
    contender = step_contenders.Trainer(
        GraphUpdater if on_gpu else StandardUpdater,
        model,
        CSRConverter('packed'),
        lambda: DeviceDataset(sparse, device) if on_gpu else sparse,
        n_batch,
        device,
        optimizer,
    )
    contender.run(WARM if on_gpu else 2)
    contender.programs()
    contender.wait()
    start = time.perf_counter()
    contender.run(MIN_STEPS)
    contender.wait()
    step = (time.perf_counter() - start) / MIN_STEPS
    n_steps = share(comm, int(numpy.clip(TURN / step, MIN_STEPS, MAX_STEPS)))
    times = []
    for _ in range(n_rounds):
        share(comm, None)  # a barrier
        clock = [time.perf_counter()]
        contender.run(n_steps)
        clock.append(time.perf_counter())
        contender.wait()
        clock.append(time.perf_counter())
        mine = [1e3 * (end - clock[0]) / n_steps for end in clock[1:]]
        times.append(numpy.max([mine] if comm is None else comm.mpi_comm.allgather(mine), axis=0))
    host, wall = map(list, zip(*times))
    cell = {
        'wall': harness.summary(wall),
        'host': harness.summary(host),
        'steps a round': n_steps,
        'bytes of gradients': 4 * sum(param.size for param in model.params()),
    }
    if comm is not None and on_gpu:
        ranks = contender.updater._context.ranks
        cell['sum in the graph'] = ranks.has_sum
        cell['NCCL alone, us'] = round(nccl_us(ranks, comm), 2)
    contender.free()
    return cell


def share(comm, value):
    """Return the value of the first rank; all wait for each other."""
    return value if comm is None else comm.mpi_comm.allgather(value)[0]


def nccl_us(ranks, comm):
    """Return device microseconds of NCCL's sum of as many elements as the gradients have."""
    from chainer.backends import cuda
    from chainermn import nccl

    comm._init_comms()
    kind = {'e': nccl.NCCL_FLOAT16, 'f': nccl.NCCL_FLOAT32, 'd': nccl.NCCL_FLOAT64}
    start, stop = cuda.cupy.cuda.Event(), cuda.cupy.cuda.Event()
    sent, stream = ranks.sent, cuda.cupy.cuda.get_current_stream()
    received = cuda.cupy.empty_like(sent)
    for _ in range(2):  # the first connects
        share(comm, None)
        start.record()
        for _ in range(N_SUMS):
            comm.nccl_comm.allReduce(
                sent.data.ptr,
                received.data.ptr,
                sent.size,
                kind[sent.dtype.char],
                nccl.NCCL_SUM,
                stream.ptr,
            )
        stop.record()
        stop.synchronize()
    return 1e3 * cuda.cupy.cuda.get_elapsed_time(start, stop) / N_SUMS


def run(n_ranks, args, argv):
    """Return what a run on so many ranks measures."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, 'found.json')
        words = [sys.executable, '-m', 'benchmarks.training.bench_scaling', *argv]
        words += ['--worker', out]
        if n_ranks > 1:
            name = 'naive' if args.device == '-1' else 'pure_nccl'
            words = ['mpirun', '-n', n_ranks, *args.mpirun.split(), *words, '--communicator', name]
        subprocess.run([str(word) for word in words], cwd=harness.ROOT, check=True)
        return json.loads(pathlib.Path(out).read_text())


def modelled(two, n_bytes, n_gpus, links=None):
    """Return the milliseconds of a step on n_gpus GPUs, hosts of `GPUS_A_HOST`.

    What two GPUs add to a step is latency for the most part. Each further GPU of a host sends as
    many bytes; hosts add up in a ring and wait as often as a tree is high.

    Args:
        two (float): milliseconds of a step on two GPUs.
        n_bytes (int): of the gradients.
        n_gpus (int): how many.
        links (dict or None): None means `LINKS`.
    """
    inner, outer, latency = (links or LINKS).values()
    n_hosts = -(-n_gpus // GPUS_A_HOST)
    within = (min(n_gpus, GPUS_A_HOST) - 2) * n_bytes / (inner * 1e6)
    between = 2 * (n_hosts - 1) / n_hosts * n_bytes / (outer * 1e6)
    waits = 2 * math.ceil(math.log2(n_hosts)) * latency / 1e3
    return two + within + between + waits


def summarized(runs, links=None):
    """Return method -> batch -> {'efficiency': ranks -> share, 'modelled': GPUs -> share}."""
    found, alone = {}, runs[1]['methods']
    for method, cells in alone.items():
        for n_batch, cell in cells.items():
            one = cell['wall']['median']
            of = {n: run['methods'][method][n_batch] for n, run in runs.items() if n > 1}
            here = {str(n): round(one / each['wall']['median'], 3) for n, each in of.items()}
            more = {}
            if 2 in of:
                two, n_bytes = of[2]['wall']['median'], cell['bytes of gradients']
                more = {str(n): round(one / modelled(two, n_bytes, n, links), 3) for n in MODELLED}
            found.setdefault(method, {})[n_batch] = {'efficiency': here, 'modelled': more}
    return found


def bars(summary):
    """Return {bar: {'value', 'met'}} of two ranks."""
    return {
        '%s, batch %s: two ranks at least %s' % (method, n_batch, EFFICIENCIES[int(n_batch)]): {
            'value': cell['efficiency']['2'],
            'met': cell['efficiency']['2'] >= EFFICIENCIES[int(n_batch)],
        }
        for method, cells in summary.items()
        for n_batch, cell in cells.items()
        if '2' in cell['efficiency'] and int(n_batch) in EFFICIENCIES
    }


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = subjects.argument_parser(__doc__, subjects.FIVE, '0', 'a number: GPUs; -1: the CPU')
    parser.add_argument('--batches', nargs='+', type=int, default=BATCHES)
    parser.add_argument('--ranks', nargs='+', type=int, default=(1, 2))
    parser.add_argument('--rounds', type=int, default=ROUNDS)
    parser.add_argument('--mpirun', default='--bind-to none', help='further options of mpirun')
    for name, value in LINKS.items():
        option = '--' + name.replace('/', '-a-').replace(', ', '-').replace(' ', '-').lower()
        parser.add_argument(option, dest=name, type=float, default=value, help=name)
    parser.add_argument('--worker', help='file that a rank writes to; for the script itself')
    parser.add_argument('--communicator', help='of the ranks; for the script itself')
    args = parser.parse_args(argv)
    if args.worker:
        return worker(args)
    if 1 not in args.ranks:
        parser.error('--ranks: expected 1 among them, which the others are compared with')
    links = {name: getattr(args, name) for name in LINKS}
    runs = {n_ranks: run(n_ranks, args, argv) for n_ranks in args.ranks}
    summary = summarized(runs, links)
    result = {
        'question': 'milliseconds of a training step on so many ranks, batches of one size each',
        'method': 'Packed, Adam; captured, from a DeviceDataset of the part of each rank, by the '
        'loop of the Trainer without extensions; on the CPU eager. Medians of %d rounds, each the '
        'slowest rank; host: until the last step was launched. modelled: efficiency on more GPUs, '
        'hosts of %d, from the steps of one and two ranks and the links'
        % (args.rounds, GPUS_A_HOST),
        'conditions': harness.step_conditions(args.commit, harness.device_of(args.device)),
        'links': links,
        'ranks': {str(n_ranks): found for n_ranks, found in runs.items()},
        'summary': summary,
        'bars': bars(summary),
    }
    for method, cells in summary.items():
        for n_batch, cell in cells.items():
            print('%s, batch %s: %s' % (method, n_batch, cell))
    harness.print_bars(result['bars'])
    print('wrote', harness.save('scaling', result, args.out))
    return None


if __name__ == '__main__':
    main()
