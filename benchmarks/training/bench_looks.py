"""How many microseconds does a captured step take to look at the Python values that it depends on?

``python -m benchmarks.training.bench_looks`` on a GPU, or with ``--device -1``, times two things
for each of three models: a look that finds no change, as before nearly every step, and the new
inventory of everything that a step can reach, which follows a change. It writes
``benchmarks/results/<gpu or cpu>/looks.json``.
"""

import functools
import time
import types

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer

from benchmarks import harness
from benchmarks.training import step_contenders, subjects
from benchmarks.training.step_contenders import EAGER
from chainer_bspmm.training.guards import Guards

LIMIT, N_BATCH = 200, 32  # molecules: how many there are does not matter
ROUNDS = 30
N_LOOKS, N_INVENTORIES = 2000, 30  # of a round
OWN = 'a Chain of 30 attributes and two dicts'


class Own(chainer.Chain):
    """A user's Chain around a classifier, with 30 attributes and two dicts of ten numbers."""

    def __init__(self, classifier):
        super().__init__()
        with self.init_scope():
            self.classifier = classifier
        for i in range(30):
            setattr(self, 'option_%d' % i, float(i))
        self.weights = {'weight %d' % i: 1.0 for i in range(10)}
        self.shares = {'share %d' % i: 0.1 for i in range(10)}

    def forward(self, *batch):
        scale = sum(self.weights[name] for name in self.weights) + sum(self.shares.values())
        return self.classifier(*batch) * (scale + self.option_0)


def trained(device):
    """Return name -> `step_contenders.Trainer` after an eager step."""
    generated = types.SimpleNamespace(tox21=None, limit=LIMIT)
    *read, _ = subjects.molecules('tox21', generated)
    sets = {}
    rsgcn, ggnn = (subjects.subject_of(method, read, sets) for method in ('rsgcn', 'ggnn'))
    own = rsgcn._replace(model=Own(rsgcn.model))
    found = {}
    for name, subject in {'rsgcn': rsgcn, 'ggnn': ggnn, OWN: own}.items():
        found[name] = step_contenders.trainers(subject, N_BATCH, device)[EAGER]()
        found[name].run(1)
    return found


def watching(trainer):
    """Return the `Guards` of a trainer's steps."""
    return Guards(trainer.model, trainer.model, trainer.optimizer)


def check(trainer):
    """Raise AssertionError unless a look finds a change if there is one, and only then."""
    guards = watching(trainer)
    key = guards.key()
    if guards.key() is not key:
        raise AssertionError('a look finds a change where there is none')
    trainer.model.changed = True
    is_found = guards.key() != key
    del trainer.model.changed
    if not is_found:
        raise AssertionError('a look does not find a new attribute')


def microseconds(function, n_calls):
    """Return the microseconds of a call, the mean of `n_calls`."""
    start = time.perf_counter()
    for _ in range(n_calls):
        function()
    return (time.perf_counter() - start) * 1e6 / n_calls


def measure(trainers, n_rounds):
    """Return name -> microseconds of a look and of an inventory, of interleaved rounds."""
    looks = {name: [] for name in trainers}
    inventories = {name: [] for name in trainers}
    guards = {name: watching(trainer) for name, trainer in trainers.items()}
    for _ in range(n_rounds):
        for name, trainer in trainers.items():
            anew = functools.partial(watching, trainer)
            looks[name].append(microseconds(guards[name].key, N_LOOKS))
            inventories[name].append(microseconds(anew, N_INVENTORIES))
    return {
        name: {
            'values': len(guards[name]._values()),
            'look': harness.summary(looks[name]),
            'inventory': harness.summary(inventories[name]),
        }
        for name in trainers
    }


def main(argv=None):
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--device', default='0', help='number of a GPU; -1: CPU')
    parser.add_argument('--rounds', type=int, default=ROUNDS)
    args = parser.parse_args(argv)
    device = harness.device_of(args.device)
    trainers = trained(device)
    for trainer in trainers.values():
        check(trainer)
    found = measure(trainers, args.rounds)
    for name, of in found.items():
        medians = of['look']['median'], of['inventory']['median']
        print('%-40s a look %7.1f us, an inventory %7.0f us' % (name, *medians))
    result = {
        'question': 'microseconds of a look at the Python values that a captured step depends on',
        'method': 'Medians of %d interleaved rounds (low, high: 10th and 90th percentile) of the '
        'mean of %d looks and %d inventories; values: how many a look compares'
        % (args.rounds, N_LOOKS, N_INVENTORIES),
        'conditions': harness.conditions(args.commit, device),
        'models': found,
    }
    print('wrote', harness.save('looks', result, args.out))


if __name__ == '__main__':
    main()
