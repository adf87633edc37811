"""Is this checkout as fast as another one? Both take turns on the same machine.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.compare_commits /tmp/before [--device @cupy:0] [--rounds 15]

Each checkout runs in a process that stays alive. They take turns, and never run at the same time.
The same code can take 1.4 times as long in one process as in another, so there are --pairs of such
processes, one after the other; it is best to keep them on the same cores (``taskset -c 4,5``). It
prints, for each checkout, the median of all rounds and the time of the fastest round, with their
ratios; the ratio of the fastest rounds is the one to judge by. It writes ``benchmarks/results/<gpu
or cpu>/compare_commits.json``, or with --only NAME ``compare_commits_NAME.json``.
"""

import contextlib
import io
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
METHODS = 'rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp'
BATCH = 128
CALLS, STEPS = 300, 40  # numbers of calls and of steps that are timed together
WARM_CAPTURED = 3000  # untimed captured steps before the timed ones
REPEATS = 8  # repetitions of the sample, because it is small
EPOCHS = 12  # epochs of a training; the second half is warm


class Worker:
    """A process that times calls and steps of the package of one checkout."""

    def __init__(self, checkout, device, only):
        paths = [str(checkout), *os.environ.get('PYTHONPATH', '').split(os.pathsep)]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))
        command = [sys.executable, __file__, '--worker', device, str(checkout), only]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        self.names = self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit('a worker ended with status %d' % self._process.wait())
        return json.loads(line)

    def time(self, name):
        """Return the microseconds of one call or step."""
        print(name, file=self._process.stdin, flush=True)
        return self._answer()

    def end(self):
        self._process.communicate()


def main(argv=None):
    from benchmarks import harness  # not at the top: a worker imports the other checkout's package

    parser = harness.argument_parser(__doc__)
    parser.add_argument('checkout', type=pathlib.Path, help='the other checkout')
    parser.add_argument('--base', help='commit of the other checkout, to record in the result')
    parser.add_argument('--device', default='@numpy')
    parser.add_argument('--pairs', type=int, default=3, help='pairs of processes')
    parser.add_argument('--rounds', type=int, default=15, help='rounds of each pair')
    parser.add_argument('--only', default='', help='time only rows whose names contain this')
    arguments = parser.parse_args(argv)
    device = harness.device_of(arguments.device)
    times = {}  # name -> (before, after), each a list of a list of rounds for each pair
    for _ in range(arguments.pairs):
        for name, pair in times_of_pair(arguments).items():
            for each, found in zip(times.setdefault(name, ([], [])), pair):
                each.append(found)
    rows = {name: row(*pair) for name, pair in times.items()}
    for name, found in rows.items():
        print('%-34s' % name, '%9.1f %9.1f us  x %.3f  fastest %9.1f %9.1f us  x %.3f' % (
            *found['median_us'], found['ratio_of_medians'],
            *found['fastest_us'], found['ratio_of_fastest']))  # fmt: skip
    result = {
        'conditions': harness.conditions(arguments.commit, device),
        'base': arguments.base,
        'pairs': arguments.pairs,
        'rounds': arguments.rounds,
        'rows': rows,
    }
    name = '_'.join(['compare_commits', *filter(None, [arguments.only])])
    print(harness.save(name, result, arguments.out))


def times_of_pair(arguments):
    """Return name -> (before, after): microseconds of the rounds of a new pair of processes."""
    workers = [
        Worker(tree.resolve(), arguments.device, arguments.only)
        for tree in (arguments.checkout, ROOT)
    ]
    before, after = workers
    assert before.names == after.names, (before.names, after.names)
    times = {name: ([], []) for name in before.names}
    for turn in range(arguments.rounds + 1):
        for name, pair in times.items():
            for which in (0, 1) if turn % 2 else (1, 0):
                taken = workers[which].time(name)
                if turn:  # the first round warms up
                    pair[which].append(taken)
    for worker in workers:
        worker.end()
    return times


def row(before, after):
    """Return a row of the result: medians, fastest rounds, and both of each pair of processes."""
    fastest = [[min(rounds) for rounds in pairs] for pairs in (before, after)]
    medians = [statistics.median(itertools.chain(*pairs)) for pairs in (before, after)]
    least = [min(pairs) for pairs in fastest]
    return {
        'median_us': medians,
        'fastest_us': least,
        'ratio_of_medians': medians[1] / medians[0],
        'ratio_of_fastest': least[1] / least[0],
        'fastest_us_of_pairs': fastest,
    }


def work(device_name, checkout, only):
    """Read names from stdin, and write microseconds to stdout."""
    import chainer_bspmm

    assert pathlib.Path(chainer_bspmm.__file__).is_relative_to(checkout), chainer_bspmm.__file__
    import chainer

    device = chainer.get_device(device_name)
    device.use()
    with contextlib.redirect_stdout(io.StringIO()):  # upstream prints "Set up RSGCN predictor..."
        timed = dict(products(device), **steps(device, only), **trainings(device, only))
    timed = {name: function for name, function in timed.items() if only in name}

    print(json.dumps(list(timed)), flush=True)
    for line in sys.stdin:
        print(json.dumps(timed[line.strip()]()), flush=True)


def clock(device, function, n):
    """Return the microseconds of a call; n calls are launched without waiting for the device."""

    def wait():
        if device.xp.__name__ == 'cupy':
            device.xp.cuda.get_current_stream().synchronize()

    def timed():
        wait()
        start = time.perf_counter()
        for _ in range(n):
            function()
        wait()
        return (time.perf_counter() - start) / n * 1e6

    return timed


def products(device):
    import chainer
    import numpy

    from chainer_bspmm import BatchedCSR, functions

    rng = numpy.random.RandomState(0)
    dense = rng.uniform(size=(100, 50, 50)) * (rng.uniform(size=(100, 50, 50)) < 0.06)
    adj = BatchedCSR.from_dense(dense.astype('f'), layout='padded').to_device(device)
    x = device.send(rng.uniform(size=(5000, 64)).astype('f'))
    gy = device.send(numpy.ones((5000, 64), 'f'))

    def forward_and_backward():
        variable = chainer.Variable(x)
        y = functions.bspmm(adj, variable)
        y.grad = gy
        y.backward()

    return {
        'functions.bspmm': clock(device, lambda: functions.bspmm(adj, x), CALLS),
        'functions.bspmm with backward': clock(device, forward_and_backward, CALLS),
    }


def steps(device, only):
    import chainer
    import numpy
    import pandas
    from chainer_chemistry.models.prediction import Regressor

    import chainer_bspmm
    from chainer_bspmm.dataset import DeviceDataset, from_smiles
    from chainer_bspmm.models import set_up_predictor
    from chainer_bspmm.training import GraphUpdater

    frame = pandas.read_csv(ROOT / 'examples' / 'qm9' / 'data' / 'qm9_sample.csv.gz')
    labels = frame.drop(columns=['index', 'smiles']).to_numpy()[:, :4].astype('f')
    is_gpu = device.xp.__name__ == 'cupy'
    vars(chainer.global_config)['bspmm_capture'] = False  # some commits capture by themselves
    timed = {}
    for method in METHODS:
        data = from_smiles(frame['smiles'].tolist(), method, labels).dataset
        kinds = [('eager', chainer.training.updaters.StandardUpdater, lambda data: data)]
        if is_gpu:
            kinds += [('captured', GraphUpdater, lambda data: data),
                      ('captured, DeviceDataset', GraphUpdater,
                       lambda data: DeviceDataset(data, device))]  # fmt: skip
        for kind, updater_type, place in kinds:
            if only not in '%s, %s' % (method, kind):
                continue
            numpy.random.seed(0)
            model = Regressor(set_up_predictor(method, 64, 4, labels.shape[1]),
                              lossfun=chainer.functions.mean_squared_error)  # fmt: skip
            model.to_device(device)
            updater = updater_type(
                chainer.iterators.SerialIterator(place(data), BATCH),
                chainer.optimizers.Adam().setup(model),
                converter=chainer_bspmm.concat_mols,
                device=device,
            )
            # So many steps capture every size of buffers, and pass the checks of the first 1,024
            # replays.
            for _ in range(3 if kind == 'eager' else WARM_CAPTURED):
                updater.update()
            n = STEPS if is_gpu else 3
            timed['%s, %s' % (method, kind)] = clock(device, updater.update, n)
    return timed


def trainings(device, only):
    """Return name -> function that times a user's two lines: epochs, first epochs, predictions."""
    import chainer
    import numpy
    import pandas
    from chainer_chemistry.models.prediction import Regressor

    import chainer_bspmm
    from chainer_bspmm.dataset import from_smiles
    from chainer_bspmm.models import set_up_predictor

    frame = pandas.read_csv(ROOT / 'examples' / 'qm9' / 'data' / 'qm9_sample.csv.gz')
    labels = frame.drop(columns=['index', 'smiles']).to_numpy()[:, :4].astype('f')
    timed = {}
    for method in ('rsgcn', 'relgcn'):
        names = ['%s, two lines, %s' % (method, what) for what in ('epoch', 'first', 'predict')]
        if not any(only in name for name in names):
            continue
        smiles = frame['smiles'].tolist() * REPEATS
        data = from_smiles(smiles, method, numpy.tile(labels, (REPEATS, 1))).dataset
        unlabelled = from_smiles(smiles, method).dataset

        def model(method=method):
            found = Regressor(set_up_predictor(method, 64, 4, labels.shape[1]),
                              lossfun=chainer.functions.mean_squared_error)  # fmt: skip
            found.to_device(device)
            return found

        def epochs(model=model, data=data):
            """Return the microseconds of each epoch of a new training."""
            vars(chainer.global_config)['bspmm_capture'] = True
            with contextlib.redirect_stdout(io.StringIO()):
                target = model()
                updater = chainer.training.updaters.StandardUpdater(
                    chainer.iterators.SerialIterator(data, BATCH),
                    chainer.optimizers.Adam().setup(target),
                    converter=chainer_bspmm.concat_mols,
                    device=device,
                )
                with tempfile.TemporaryDirectory() as folder:
                    trainer = chainer.training.Trainer(updater, (EPOCHS, 'epoch'), out=folder)
                    ends = [time.perf_counter()]
                    trainer.extend(chainer.training.extensions.LogReport())
                    trainer.extend(
                        lambda trainer: ends.append(waited(device)), trigger=(1, 'epoch')
                    )
                    trainer.run()
            vars(chainer.global_config)['bspmm_capture'] = False
            return [1e6 * (stop - start) for start, stop in zip(ends, ends[1:])]

        def predictions(model=model, data=unlabelled):
            vars(chainer.global_config)['bspmm_capture'] = True
            with contextlib.redirect_stdout(io.StringIO()):
                target = model()
            target.predict(data[:BATCH], batchsize=BATCH, converter=chainer_bspmm.concat_mols)
            start = waited(device)
            target.predict(data, batchsize=BATCH, converter=chainer_bspmm.concat_mols)
            stop = waited(device)
            vars(chainer.global_config)['bspmm_capture'] = False
            return 1e6 * (stop - start)

        timed[names[0]] = lambda epochs=epochs: statistics.median(epochs()[EPOCHS // 2 :])
        timed[names[1]] = lambda epochs=epochs: epochs()[0]
        timed[names[2]] = predictions
    return timed


def waited(device):
    """Wait until all work on a device is done; return the time."""
    if device.xp.__name__ == 'cupy':
        device.device.synchronize()
    return time.perf_counter()


if __name__ == '__main__':
    if sys.argv[1:2] == ['--worker']:
        work(sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4])
    else:
        main()
