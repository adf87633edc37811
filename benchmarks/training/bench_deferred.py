"""How much faster is a captured step that defers the sums of its gradients?

``python -m benchmarks.training.bench_deferred --tox21 tox21.csv.gz`` on a GPU times captured steps
of five models, which add up all partial sums of gradients at the end of the backward pass, beside
the same steps that add up each where it arises. It writes
``benchmarks/results/<gpu or cpu>/deferred.json``. A CPU captures nothing: eager steps are timed.
"""

import contextlib
import itertools
import unittest.mock

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import numpy

from benchmarks import harness
from benchmarks.training import bench_steps, step_contenders, subjects
from benchmarks.training.step_contenders import EAGER, ON_DEVICE, Trainer, UPSTREAM
from chainer_bspmm.training.training_step import TrainingStep

BATCHES = 128, 32
SECONDS = 6.0  # for about twenty rounds
WARM = step_contenders.WARM_CAPTURED
LEAST = 1.08  # ratio of the times below which deferred sums are not worth their code
AT_ONCE = ON_DEVICE + ', sums at once'


class Deferring(Trainer):
    """Train by steps that defer sums; AssertionError if one does not."""

    def programs(self):
        found = super().programs()
        if not all(program.work._defers_sums for program in found):
            raise AssertionError('a step does not defer its sums')
        return found


class AtOnce(Trainer):
    """Train by steps that defer no sums."""

    @contextlib.contextmanager
    def _memory(self):
        with unittest.mock.patch.object(TrainingStep, '_backward', _backward), super()._memory():
            yield


def _backward(self, loss, mode):
    loss.backward()


# Contender -> its class, and its name in `step_contenders.trainers`.
CAPTURED = {ON_DEVICE: (Deferring, ON_DEVICE), AT_ONCE: (AtOnce, ON_DEVICE)}
ON_HOST = {EAGER: (Trainer, EAGER)}


def contenders(device):
    return CAPTURED if step_contenders.can_capture(device) else ON_HOST


def check(subject, device):
    """Return the relative errors of the contenders' steps; AssertionError if one is large."""
    subject = subject._replace(model=step_contenders.without_dropout(subject.model))
    index = step_contenders.mixed_sizes(subject.dense)
    changes = step_contenders.changes_of(subject, index, [UPSTREAM], device)
    for name, (kind, of) in contenders(device).items():
        changes[name] = step_contenders.changes_of(subject, index, [of], device, kind)[of]
    return step_contenders.judged(changes, UPSTREAM)


def bars(methods, batches):
    """Return {bar: {'value', 'met'}}: for each batch size the geometric mean over the models."""
    found = {}
    for n_batch in map(str, batches):
        cells = [of['batches'][n_batch] for of in methods.values() if n_batch in of['batches']]
        ratios = [step_contenders.ratio(cell, ON_DEVICE, AT_ONCE) for cell in cells]
        if ratios and None not in ratios:
            mean = float(numpy.exp(numpy.mean(numpy.log(ratios))))
            title = 'batch %s: steps that defer sums are at least %gx as fast' % (n_batch, LEAST)
            found[title] = harness.bar(mean, mean >= LEAST, digits=3)
    return found


def run(args, device):
    """Measure missing cells; the file is written after every one."""
    *read, description = subjects.molecules('tox21', args)
    head = {
        'question': 'milliseconds of a captured step with and without deferred sums',
        'method': bench_steps.METHOD + 'Folded batches, from a DeviceDataset. %s: partial sums of '
        'gradients are added up where they arise, not at the end of the backward pass.' % AT_ONCE,
        'conditions': harness.step_conditions(args.commit, device),
        'options': {
            'limit': args.limit,
            'seconds': args.seconds,
            'tox21': 'a file' if args.tox21 else 'generated',
        },
        'description': description,
    }
    result = harness.resumed('deferred', head, args.out)
    methods = result.setdefault('methods', {})
    sets, ready = {}, {}
    for n_batch, method in itertools.product(args.batches, args.methods):
        of = methods.setdefault(method, {'batches': {}})
        if str(n_batch) in of['batches']:
            continue
        if method not in ready:
            ready[method] = subjects.subject_of(method, read, sets)
            of['relative_errors'] = check(ready[method], device)
        makers = {
            name: step_contenders.trainers(ready[method], n_batch, device, kind)[key]
            for name, (kind, key) in contenders(device).items()
        }
        cell = of['batches'][str(n_batch)] = bench_steps.run_cell(makers, WARM, args.seconds)
        title = '%s, batch %d' % (method, n_batch)
        print('\n'.join(bench_steps.table(title, cell)), flush=True)
        result['bars'] = bars(methods, args.batches)
        harness.save('deferred', result, args.out)
    result['bars'] = bars(methods, args.batches)
    harness.print_bars(result['bars'])
    print('wrote', harness.save('deferred', result, args.out))


def main(argv=None):
    parser = subjects.argument_parser(
        __doc__, subjects.FIVE, '0', 'number of a GPU; -1 (CPU) captures nothing'
    )
    parser.add_argument('--batches', nargs='+', type=int, default=BATCHES)
    parser.add_argument(
        '--seconds', type=float, default=SECONDS, help='of the rounds of each cell, at least'
    )
    args = parser.parse_args(argv)
    run(args, harness.device_of(args.device))


if __name__ == '__main__':
    main()
