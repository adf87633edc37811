"""How much faster do README's two lines make upstream's `run_train` and `predict`?

Upstream's dense data sets, as its parsers make them, are trained by Chainer Chemistry's
``run_train`` with validation and default extensions. Contenders are its dense model; the two lines;
and, on a GPU, a GraphUpdater with a DeviceDataset, which shows how much more lines would add.
`predict` takes dense examples, and with the two lines also a SparseDataset::

    python -m benchmarks.training.bench_two_lines --tox21 tox21.csv.gz --device 0

writes ``two_lines.json``. Without ``--device`` it runs on one thread of the CPU
(OMP_NUM_THREADS=1), in batches of 128. Contenders take turns. In our turns the first epoch is not
counted, because it includes conversion and captures. Upstream has neither, and trains on two
batches beforehand.
"""

import contextlib
import io
import itertools
import statistics
import tempfile
import time
from unittest import mock

import chainer_bspmm
import chainer
from chainer import training
from chainer.backends import cuda
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
from chainer_chemistry.datasets import NumpyTupleDataset
from chainer_chemistry.training.extensions.auto_print_report import AutoPrintReport
from chainer_chemistry.utils import run_train
import numpy

from benchmarks import harness
from benchmarks.training import subjects
from chainer_bspmm.dataset import DeviceDataset, to_sparse
from chainer_bspmm.training import GraphUpdater

UPSTREAM, TWO_LINES, MORE_LINES = 'upstream', 'two lines', 'GraphUpdater, DeviceDataset'
SPARSE = 'two lines, SparseDataset'
# Bars: upstream's time over ours on a GPU, and our time over the time with more lines.
ON_GPU, OVER_MORE_LINES = 20, 1.3
ON_CPU = {'rsgcn': 5, 'ggnn': 5, 'gin': 5, 'relgcn': 8.5, 'nfp': 10}
EPOCHS = {UPSTREAM: 1, TWO_LINES: 6, MORE_LINES: 6}  # epochs of a turn
PREDICT, PREDICT_BATCH = 'predict', 128


class Ends(training.Extension):
    """Extension that records the times when the training begins and epochs end."""

    trigger = 1, 'epoch'

    def __init__(self, device):
        self._device = device
        self.times = []

    def initialize(self, trainer):
        self(trainer)

    def __call__(self, trainer):
        synchronise(self._device)
        self.times.append(time.perf_counter())


def synchronise(device):
    if device.xp is not numpy:
        cuda.cupy.cuda.Device().synchronize()


def as_parsed(dense):
    """Return a dense data set whose columns are arrays, as upstream's parsers make them."""
    columns = []
    for values in dense.get_datasets():
        if isinstance(values, list):
            column = numpy.empty(len(values), object)
            column[:] = values
            values = column
        columns.append(values)
    return NumpyTupleDataset(*columns)


def epochs(name, model, train, valid, n_batch, device):
    """Train; return the seconds of the epochs that count."""
    ends = Ends(device)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()) as out,
        # By default the report prints to the sys.stdout at the time of its import.
        mock.patch.object(AutoPrintReport.__init__, '__defaults__', ('LogReport', out)),
    ):
        if name == MORE_LINES:
            data = [DeviceDataset(to_sparse(part), device) for part in (train, valid)]
            optimizer = chainer.optimizers.Adam().setup(model)
            updater = GraphUpdater(SerialIterator(data[0], n_batch), optimizer, device=device)
            trainer = training.Trainer(updater, (EPOCHS[name], 'epoch'), out=folder)
            iterator = SerialIterator(data[1], n_batch, repeat=False, shuffle=False)
            converter = chainer_bspmm.concat_mols
            trainer.extend(
                extensions.Evaluator(iterator, model, device=device, converter=converter)
            )
            trainer.extend(extensions.LogReport())
            trainer.extend(AutoPrintReport())
            trainer.extend(extensions.ProgressBar(update_interval=10))
            trainer.extend(ends)
            trainer.run()
        else:
            run_train(
                model,
                train,
                valid=valid,
                batch_size=n_batch,
                epoch=EPOCHS[name],
                out=folder,
                converter=upstream_concat_mols if name == UPSTREAM else chainer_bspmm.concat_mols,
                device=device,
                extensions_list=[ends],
            )
    seconds = [after - before for before, after in itertools.pairwise(ends.times)]
    return seconds if name == UPSTREAM else seconds[1:]


def predictions(name, model, data, device):
    """Predict; return the seconds and the values."""
    converter = upstream_concat_mols if name == UPSTREAM else chainer_bspmm.concat_mols
    synchronise(device)
    start = time.perf_counter()
    values = model.predict(data, batchsize=PREDICT_BATCH, converter=converter)
    return time.perf_counter() - start, values


def predicting(models, train, device, n_predictions):
    """Measure `predict`; return the number of molecules, the error, and name -> seconds."""
    inputs = [example[:2] for example in train]
    inputs = (inputs * (n_predictions // len(inputs) + 1))[:n_predictions]
    seconds, values = {}, {}
    for name, data in ((UPSTREAM, inputs), (TWO_LINES, inputs), (SPARSE, to_sparse(inputs))):
        model = models[UPSTREAM if name == UPSTREAM else TWO_LINES]
        predictions(name, model, data[: 32 * PREDICT_BATCH], device)
        seconds[name], values[name] = predictions(name, model, data, device)
    error = max(harness.relative_error(found, values[UPSTREAM]) for found in values.values())
    harness.gate({'predictions': error}, 1e-4)
    return {
        'molecules': n_predictions,
        'error': error,
        'seconds': {name: round(value, 3) for name, value in seconds.items()},
    }


def measured(method, dense, device, cells, n_rounds, n_predictions):
    """Yield (cell, measurements); a cell is a batch size as text, or `PREDICT`."""
    labels = dense.get_datasets()[-1]
    n_train = len(dense) * 9 // 10
    train = dense[:n_train]
    valid = dense[n_train:]
    names = [UPSTREAM, TWO_LINES] + [MORE_LINES] * (device.xp is not numpy)
    models = {name: subjects.new_model(method, labels) for name in names}
    for model in models.values():
        model.to_device(device)
        model(*upstream_concat_mols(train[:8], device))  # makes all parameters
    for name in names[1:]:
        models[name].copyparams(models[UPSTREAM])
        chainer_bspmm.sparsify(models[name])
    with chainer.using_config('bspmm_capture', True):
        for cell in cells:
            if cell == PREDICT:
                yield cell, predicting(models, train, device, n_predictions)
                continue
            n_batch = int(cell)
            epochs(UPSTREAM, models[UPSTREAM], train[: 2 * n_batch], valid, n_batch, device)
            seconds = {name: [] for name in names}
            for _ in range(n_rounds):
                for name in names:
                    seconds[name] += epochs(name, models[name], train, valid, n_batch, device)
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            found = {
                'n_train': n_train,
                'seconds an epoch': {
                    name: harness.summary(times) for name, times in seconds.items()
                },
                'over upstream': {
                    name: round(medians[UPSTREAM] / median, 2) for name, median in medians.items()
                },
            }
            yield cell, found


def bars(result, on_gpu):
    """Return {bar: {'value', 'met'}} for the worst cells."""
    found = {}
    for data, of_methods in result['data'].items():
        for method, of_batches in of_methods.items():
            for n_batch, cell in of_batches.items():
                if n_batch == PREDICT:
                    continue
                place = '%s, %s, batch %s' % (data, method, n_batch)
                over = cell['over upstream'][TWO_LINES]
                bar = ON_GPU if on_gpu else ON_CPU[method]
                title = '%s: at least %g times upstream' % (place, bar)
                found[title] = harness.bar(over, over >= bar)
                if on_gpu:
                    times = cell['seconds an epoch']
                    ratio = times[TWO_LINES]['median'] / times[MORE_LINES]['median']
                    title = '%s: at most %g times more lines' % (place, OVER_MORE_LINES)
                    found[title] = harness.bar(ratio, ratio <= OVER_MORE_LINES)
    return found


def main():
    parser = subjects.argument_parser(__doc__, subjects.FIVE, '-1', 'such as 0; default: the CPU')
    names = ['tox21', 'nci', 'qm9']
    parser.add_argument('--data', nargs='+', default=names, choices=names)
    parser.add_argument('--batches', nargs='+', type=int)
    parser.add_argument('--rounds', type=int, default=2)
    parser.add_argument('--predictions', type=int, help='molecules; default: 100,000 on a GPU')
    args = parser.parse_args()
    device = harness.device_of(args.device)
    on_gpu = device.xp is not numpy
    head = {
        'conditions': harness.step_conditions(args.commit, device),
        'options': {name: vars(args)[name] for name in ('limit', 'rounds', 'predictions')},
    }
    result = harness.resumed('two_lines', head, args.out)
    for data in args.data:
        *read, description = subjects.molecules(data, args)
        of_methods = result.setdefault('data', {}).setdefault(description, {})
        sets: dict = {}
        for method in args.methods:
            found = of_methods.setdefault(method, {})
            cells = [PREDICT, *map(str, args.batches or ([32, 128] if on_gpu else [128]))]
            cells = [cell for cell in cells if cell not in found]
            if not cells:
                continue
            dense = as_parsed(subjects.of_kind(sets, read, method)[0])
            n_predictions = args.predictions or (100_000 if on_gpu else len(dense))
            for name, cell in measured(method, dense, device, cells, args.rounds, n_predictions):
                found[name] = cell
                print(data, method, name, cell.get('over upstream', cell.get('seconds')))
                result['bars'] = bars(result, on_gpu)
                harness.save('two_lines', result, args.out)
    harness.print_bars(result['bars'])


if __name__ == '__main__':
    main()
