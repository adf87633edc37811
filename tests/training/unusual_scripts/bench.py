"""`Bench` has data, models and results of a script; `script` adds one to the table of its file."""

import random
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

import chainer_bspmm
import chainer
from chainer import functions as F, optimizers, training
from chainer.backends import cuda
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.triggers import ManualScheduleTrigger
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models.prediction import set_up_predictor

N_STEPS = 48
BATCH = 6
N_LABELS = 2
RATE = 0.05
CHANGES = {21: 0.5, 27: 2.0, 28: 0.25, 37: 0.75}  # step after which the weight changes -> weight


class Script(NamedTuple):
    """A script, and the ways in which its training may differ from Chainer's own loop.

    `quick`: the script is one of the most telling, and part of `make test`. `outside`: it keeps
    state outside of Python's memory; if results differ, a warning must match this pattern ('' if
    only the documentation can say so). `refused`: a pattern of the error that names the cause and
    may end the script instead. `told`: a pattern that a warning must match where steps can be
    captured. `n_captures`: how often stand-ins must capture its step. `fused`: stand-ins launch its
    update with the step, so that guards are skipped if the code between two steps is known.
    """

    run: Callable
    quick: bool = False
    outside: str | None = None
    refused: str | None = None
    told: str = ''
    n_captures: int | None = None
    fused: bool = False


def script(table: dict, **how: Any) -> Callable:
    """Return a decorator that adds a script to the table of its file."""

    def add(function):
        table[function.__name__] = Script(function, **how)
        return function

    return add


def at(*steps: int) -> ManualScheduleTrigger:
    """Return a trigger that fires after the steps with these numbers."""
    return ManualScheduleTrigger(list(steps), 'iteration')


def every(n: int) -> tuple[int, str]:
    return n, 'iteration'


def changed_by(change: Callable[[float], Any]) -> tuple:
    """Return an extension that calls ``change(weight)``, and a trigger for the steps of CHANGES."""
    return (lambda trainer: change(CHANGES[trainer.updater.iteration])), at(*CHANGES)


def warm(n: int) -> float:
    """Return the factor of the n-th call of a warm-up."""
    return 1 - 0.5**n


def number(value: Any) -> float:
    """Return a variable or an array of one element as a float on the host."""
    return float(getattr(value, 'array', value))


class Bench:
    """A device, small data sets and models from a seed, and a log of reported values.

    Args:
        device (Device): where models are trained.
    """

    def __init__(self, device: chainer.backend.Device):
        self.device = device
        self.xp = device.xp
        self.reports: list[dict[str, float]] = []
        self.models: list[chainer.Link] = []
        random.seed(0)
        numpy.random.seed(0)
        if self.xp is not numpy:
            self.xp.random.seed(0)

    def molecules(self, n: int = 4 * BATCH, seed: int = 0) -> list[tuple]:
        """Return dense examples (atoms, adj, labels) of 4 to 6 atoms and four kinds of bonds."""
        rng = numpy.random.RandomState(seed)
        examples = []
        for _ in range(n):
            size = rng.randint(4, 7)
            bonds = numpy.triu(rng.randint(0, 5, (size, size)) * (rng.uniform(size=size) < 0.5), 1)
            adj = numpy.stack([bonds == kind for kind in range(1, 5)]).astype('f')
            atoms = rng.randint(1, 9, size).astype('i')
            labels = (atoms.sum() / 20 + rng.normal(size=N_LABELS)).astype('f')
            examples.append((atoms, adj + adj.transpose(0, 2, 1), labels))
        return examples

    def predictor(self, n_out: int = N_LABELS, method: str = 'relgcn') -> chainer.Link:
        """Return a swapped predictor: the first of the two lines."""
        return chainer_bspmm.sparsify(set_up_predictor(method, 8, 1, n_out))

    def updater(
        self,
        model: chainer.Link,
        *,
        optimizer: Any = None,
        loss_func: Callable | None = None,
        data: Any = None,
        converter: Callable = chainer_bspmm.concat_mols,
        kind: Any = StandardUpdater,
        **options: Any,
    ) -> Any:
        """Return an updater like a user's, with our converter: the second of the two lines."""
        optimizer = optimizer or optimizers.SGD(RATE)
        optimizer.setup(model)
        iterator = SerialIterator(self.molecules() if data is None else data, BATCH)
        self.models.append(model)
        return kind(
            iterator,
            optimizer,
            converter=converter,
            device=self.device,
            loss_func=loss_func,
            **options,
        )

    def run(self, updater: Any, *extended: tuple, until: Any = None, n_steps: int = N_STEPS) -> Any:
        """Train in a Trainer with pairs of extension and trigger, and a LogReport of each step."""
        with tempfile.TemporaryDirectory() as folder:
            trainer = training.Trainer(updater, until or (n_steps, 'iteration'), out=folder)
            log = extensions.LogReport(trigger=(1, 'iteration'), log_name=None)  # writes no file
            trainer.extend(log)
            for extension, trigger in extended:
                trainer.extend(extension, trigger=trigger)
            trainer.run()
        for entry in log.log:
            del entry['elapsed_time']
        self.reports += log.log
        return updater

    def train(self, model: chainer.Link, *extended: tuple, n_steps: int = N_STEPS, **options: Any):
        """Make an updater of a model, run it, and return it."""
        return self.run(self.updater(model, **options), *extended, n_steps=n_steps)

    def step(self, updater: Any, model: chainer.Link | None = None) -> dict[str, float]:
        """Update once, as in a user's own loop; return the reported values."""
        model = model or updater.get_optimizer('main').target
        reporter = chainer.Reporter()
        reporter.add_observer('main', model)
        reporter.add_observers('main', model.namedlinks(skipself=True))
        observation: dict[str, Any] = {}
        with reporter.scope(observation):
            updater.update()
        reported = {name: number(value) for name, value in observation.items()}
        self.reports.append(reported)
        return reported

    def parameters(self) -> dict[str, numpy.ndarray]:
        """Return the parameters of all models that were trained, on the host."""
        return {
            '%d%s' % (i, path): cuda.to_cpu(param.array).copy()
            for i, model in enumerate(self.models)
            for path, param in model.namedparams(include_uninit=False)
        }


class UsersExamples(chainer.dataset.DatasetMixin):
    """A user's data set, which has no copy on the device: each batch is sent there."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def get_example(self, i):
        return self.examples[i]


class Squares(chainer.Chain):
    """A user's Chain around a predictor, with the mean squared error, which `weighed` changes."""

    def __init__(self, bench: Bench, **attributes: Any):
        super().__init__()
        with self.init_scope():
            self.predictor = bench.predictor()
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, atoms, adj, t):
        loss = self.weighed(F.mean_squared_error(self.predictor(atoms, adj), t))
        chainer.report({'loss': loss}, self)
        return loss

    def weighed(self, loss):
        return loss


class Weighted(Squares):
    """A Chain with the mean squared error times a number, the `factor` of the step."""

    def weighed(self, loss):
        return loss * self.factor()

    def factor(self):
        return 1.0
