"""How does a training step scale over ranks, and how would it on more GPUs than there are?

``python -m benchmarks.training.bench_scaling --tox21 tox21.csv.gz --ranks 1 2`` starts itself under
mpirun for every number of ranks. Each rank has a GPU of this host, with its part of the data set,
and runs captured steps; with ``--device -1`` it runs eager steps on the CPU. It writes
``benchmarks/results/<gpu or cpu>/scaling.json``.

Weak scaling: every rank has batches of the same size. Strong scaling: the batches of all ranks
together have the same size. With ``--qm9 qm9.csv.gz`` it also runs epochs of an example, including
validation. A single rank trains without MPI.
"""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import chainer_bspmm
import chainer
from chainer.training.updaters import StandardUpdater
import numpy

from benchmarks import harness
from benchmarks.training import example_runs, step_contenders, subjects
from chainer_bspmm.dataset import CSRConverter, DeviceDataset
from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.cuda_graphs import Capturer

BATCHES = 128, 1024  # molecules in a batch of one rank
TOTAL = 1024  # molecules in the batches of all ranks
EFFICIENCIES = {128: 0.93, 1024: 0.97}  # batch of a rank -> least efficiency of two ranks
# Seconds and steps of a round, which is between two barriers. It is so short that few rounds have a
# check, which takes as long as dozens of steps and comes once in 2,000 replays of a form.
TURN, MIN_STEPS, MAX_STEPS = 0.05, 4, 500
ROUNDS = 31
WARM = 3000  # steps, after which most forms have passed the checks of their first 1,024 replays
N_EXCHANGES = 200
EPOCHS = 10  # epochs of an example
MODELLED = 8, 64, 512  # numbers of GPUs for which efficiencies are modelled
MODEL_ERROR = 0.1  # largest error of a modelled efficiency
GPUS_A_HOST = 8
LINKS = {
    'GB/s between GPUs of a host': 150.0,
    'GB/s between hosts, of a GPU': 25.0,
    'us between hosts': 5.0,
    'us of a second launch': 10.0,
}


def worker(args):
    """Measure on this rank; the first rank writes the results of all."""
    comm = None
    if args.communicator:
        import chainermn

        comm = chainermn.create_communicator(args.communicator)
    on_gpu = args.device != '-1'
    device = harness.device_of(str(comm.intra_rank if comm and on_gpu else args.device))
    *read, description = subjects.molecules('tox21', args)
    sets, found = {}, {}
    for method in args.methods:
        subject = subjects.subject_of(method, read, sets)
        model = chainer_bspmm.sparsify(subject.model)
        n_ranks = 1 if comm is None else comm.size
        for n_batch in dict.fromkeys([*args.batches, args.total // n_ranks]):
            cell = found.setdefault(method, {})
            cell[str(n_batch)] = measure(model, subject.data, n_batch, device, comm, args.rounds)
    if comm is None or comm.rank == 0:
        result = {'methods': found, 'description': description}
        pathlib.Path(args.worker).write_text(json.dumps(result))


def measure(model, sparse, n_batch, device, comm, n_rounds):
    """Return the milliseconds of a step of all ranks, and on GPUs of their exchange alone."""
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
    contender.warm(WARM)
    n_steps = share(comm, step_contenders.steps_of_a_turn(contender, TURN, MIN_STEPS, MAX_STEPS))
    times = []
    for _ in range(n_rounds):
        share(comm, None)  # it is used as a barrier
        mine = step_contenders.turn(contender, n_steps)
        times.append(numpy.max([mine] if comm is None else comm.mpi_comm.allgather(mine), axis=0))
    host, wall = map(list, zip(*times))
    cell = {
        'wall': harness.summary(wall),
        'host': harness.summary(host),
        'steps a round': n_steps,
        'bytes of gradients': 4 * sum(param.size for param in model.params()),
    }
    if comm is not None and on_gpu:
        ranks = contender.updater._driver.session.update.gradients
        cell['in the graph'] = ranks.has_sum
        cell['exchange alone, us'] = round(exchange_us(ranks, comm, device), 2)
    return cell


def share(comm, value):
    """Return the first rank's value on all ranks, which wait for each other."""
    return value if comm is None else comm.mpi_comm.allgather(value)[0]


def exchange_us(ranks, comm, device):
    """Return the device microseconds of replacing gradients by their mean over ranks."""
    from chainer.backends import cuda

    loss = cuda.cupy.zeros((), 'f')
    capturer = Capturer(device)
    parts = [lambda: ranks.pack(1, loss), ranks.unpack]
    if ranks.has_sum:
        parts = [lambda: (ranks.pack(1, loss), ranks.unpack())]
    else:
        ranks.add_up()  # the first call connects the ranks
    graphs = [capturer.capture(part)[0] for part in parts]
    start, stop = cuda.cupy.cuda.Event(), cuda.cupy.cuda.Event()
    for _ in range(2):
        share(comm, None)
        start.record()
        for _ in range(N_EXCHANGES):
            graphs[0]()
            ranks.add_up()
            for graph in graphs[1:]:
                graph()
        stop.record()
        stop.synchronize()
    return 1e3 * cuda.cupy.cuda.get_elapsed_time(start, stop) / N_EXCHANGES


def run(n_ranks, args, argv):
    """Run on so many ranks; return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, 'found.json')
        words = ['-m', 'benchmarks.training.bench_scaling', *argv, '--worker', out]
        on_ranks(n_ranks, args, words)
        found = json.loads(pathlib.Path(out).read_text())
        if args.qm9:
            found['epochs'] = epochs(n_ranks, args, os.path.join(folder, 'out'))
    return found


def epochs(n_ranks, args, folder):
    """Run an example on all of QM9; return seconds of its epochs after the first, and its test."""
    script = harness.ROOT / 'examples' / 'qm9' / 'train_qm9.py'
    words = [script, '--data', args.qm9, '--method', 'rsgcn', '--epoch', EPOCHS, '--out', folder]
    words += [*example_runs.OPTIONS, *example_runs.OWN_OPTIONS['qm9']]
    words += ['--device', args.device, '--padded-to', 'batch']
    on_ranks(n_ranks, args, words)
    folder = pathlib.Path(folder)
    ends = [entry['elapsed_time'] for entry in json.loads((folder / 'log').read_text())]
    return {
        'seconds': harness.summary([end - start for start, end in zip(ends, ends[1:])]),
        'test': json.loads((folder / 'result.json').read_text())['test'],
    }


def on_ranks(n_ranks, args, words):
    """Run Python with these arguments, under mpirun if there are several ranks."""
    words = [sys.executable, *words]
    if n_ranks > 1:
        name = 'naive' if args.device == '-1' else 'pure_nccl'
        words = ['mpirun', '-n', n_ranks, *args.mpirun.split(), *words, '--communicator', name]
    words = [str(word) for word in words]
    subprocess.run(words, cwd=harness.ROOT, check=True, env=example_runs.environment())


def modelled(one, exchange, n_bytes, n_gpus, links=None):
    """Return the modelled milliseconds of a step on n_gpus GPUs, in hosts of `GPUS_A_HOST`.

    `one` is the time of a step on one GPU in milliseconds. `exchange` is the time of an exchange
    between two GPUs in microseconds, most of which is latency. Each further GPU of a host sends the
    same number of bytes. Hosts add up in a ring, with as many latencies as a tree has levels,
    between two launches.
    """
    inner, outer, latency, launch = (links or LINKS).values()
    n_hosts = -(-n_gpus // GPUS_A_HOST)
    within = (min(n_gpus, GPUS_A_HOST) - 2) * n_bytes / (inner * 1e6)
    between = 2 * (n_hosts - 1) / n_hosts * n_bytes / (outer * 1e6)
    waits = 2 * math.ceil(math.log2(n_hosts)) * latency / 1e3 + (n_hosts > 1) * launch / 1e3
    return one + exchange / 1e3 + within + between + waits


def summarized(runs, batches, total, links=None):
    """Return method -> efficiencies (weak) and speed-ups (strong) of all runs.

    'weak': batch -> ranks or GPUs -> {'measured', 'modelled'}. 'strong': ranks -> speed-up for
    batches of `total` molecules over all ranks.
    """
    found = {}
    alone = runs[1]['methods']
    for method, cells in alone.items():
        of = {n: run['methods'][method] for n, run in runs.items() if n > 1}
        weak = {}
        for n_batch in map(str, batches):
            one = cells[n_batch]['wall']['median']
            shares = weak.setdefault(n_batch, {})
            for n, others in of.items():
                share_ = one / others[n_batch]['wall']['median']
                shares[str(n)] = {'measured': round(share_, 3)}
            exchange = of.get(2, {}).get(n_batch, {}).get('exchange alone, us')
            if exchange is not None:
                for n in sorted({*of, *MODELLED}):
                    n_bytes = cells[n_batch]['bytes of gradients']
                    share_ = one / modelled(one, exchange, n_bytes, n, links)
                    shares.setdefault(str(n), {})['modelled'] = round(share_, 3)
        whole = cells[str(total)]['wall']['median']
        strong = {n: whole / cells[str(total // n)]['wall']['median'] for n, cells in of.items()}
        found[method] = {
            'weak': weak,
            'strong': {str(n): round(times, 2) for n, times in strong.items()},
        }
    return found


def bars(summary):
    """Return {bar: {'value', 'met'}} for two ranks, and for the model."""
    found = {}
    for method, of in summary.items():
        for n_batch, shares in of['weak'].items():
            title = '%s, batch %s: ' % (method, n_batch)
            if '2' in shares and int(n_batch) in EFFICIENCIES:
                least = EFFICIENCIES[int(n_batch)]
                value = shares['2']['measured']
                which = title + 'two ranks at least %s' % least
                found[which] = harness.bar(value, value >= least, 3)
            errors = [
                abs(share_['modelled'] / share_['measured'] - 1)
                for share_ in shares.values()
                if len(share_) == 2
            ]
            if errors:
                which = title + 'the model within %s' % MODEL_ERROR
                found[which] = harness.bar(max(errors), max(errors) <= MODEL_ERROR, 3)
    return found


def measured(args, argv):
    """Run on each number of ranks; return the result, with its question, method and conditions."""
    runs = {str(n_ranks): run(n_ranks, args, argv) for n_ranks in args.ranks}
    return {
        'question': 'milliseconds of a training step on so many ranks, batches of one size each',
        'method': 'Packed, Adam; captured, from a DeviceDataset of the part of each rank, by the '
        'loop of the Trainer without extensions; on the CPU eager. Medians of %d rounds, each the '
        'slowest rank; host: until the last step was launched. weak: efficiency of batches of one '
        'size for each rank; modelled: from the step of one rank, the exchange of two alone, and '
        'the links, hosts of %d; strong: speed-up of batches of one size for all ranks. epochs: of '
        'the example with validation, RSGCN' % (args.rounds, GPUS_A_HOST),
        'conditions': harness.step_conditions(args.commit, harness.device_of(args.device)),
        'ranks': runs,
    }


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = subjects.argument_parser(__doc__, subjects.FIVE, '0', 'a number: GPUs; -1: the CPU')
    parser.add_argument('--batches', nargs='+', type=int, default=BATCHES)
    parser.add_argument('--total', type=int, default=TOTAL, help='batch of all ranks together')
    parser.add_argument('--qm9', help='all of QM9, by examples/qm9/make_sample.py --all')
    parser.add_argument('--ranks', nargs='+', type=int, default=(1, 2))
    parser.add_argument('--rounds', type=int, default=ROUNDS)
    parser.add_argument('--mpirun', default='--bind-to none', help='further options of mpirun')
    for name, value in LINKS.items():
        option = '--' + name.replace('/', '-a-').replace(', ', '-').replace(' ', '-').lower()
        parser.add_argument(option, dest=name, type=float, default=value, help=name)
    parser.add_argument('--again', help='an earlier result, which is summarized again, with links')
    parser.add_argument('--worker', help='file that a rank writes to; for the script itself')
    parser.add_argument('--communicator', help='of the ranks; for the script itself')
    args = parser.parse_args(argv)
    if args.worker:
        return worker(args)
    if 1 not in args.ranks:
        parser.error('--ranks: expected 1 among them, which the others are compared with')
    links = {name: getattr(args, name) for name in LINKS}
    result = (
        json.loads(pathlib.Path(args.again).read_text()) if args.again else measured(args, argv)
    )
    runs = {int(n_ranks): found for n_ranks, found in result['ranks'].items()}
    summary = summarized(runs, args.batches, args.total, links)
    result.update(links=links, summary=summary, bars=bars(summary))
    for method, of in summary.items():
        for n_batch, shares in of['weak'].items():
            print('%s, batch %s: %s' % (method, n_batch, shares))
        print('%s, batch %d of all: %s' % (method, args.total, of['strong']))
    harness.print_bars(result['bars'])
    print('wrote', harness.save('scaling', result, args.out))
    return None


if __name__ == '__main__':
    main()
