"""Chainer's and Chainer Chemistry's evaluators on captured batches."""

import functools
from collections.abc import Callable

import chainer
from chainer import reporter
from chainer.backends import cuda
from chainer.training.extensions import Evaluator

from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.training import state
from chainer_bspmm.training.predictor import Replays
from chainer_bspmm.training.programs import StepDiffers

# Chainer Chemistry's, by name: their modules import scikit-learn, which takes a second.
BATCH_EVALUATORS = {
    'chainer_chemistry.training.extensions.%s' % name
    for name in (
        'batch_evaluator.BatchEvaluator',
        'prc_auc_evaluator.PRCAUCEvaluator',
        'r2_score_evaluator.R2ScoreEvaluator',
        'roc_auc_evaluator.ROCAUCEvaluator',
    )
}


class _Evaluation(Replays):
    """Evaluate batch after batch: the first of a layout eagerly, the others by replays."""

    _called: Callable  # of the arrays of a batch: name -> value
    what, who = 'evaluation', 'GraphUpdater: an evaluator evaluates'
    raised = *Replays.raised, StepDiffers

    def evaluate(self, examples):
        """Return name -> value of a batch; the next one may overwrite the arrays.

        Called in test mode.
        """
        values = self._replayed(examples)
        if values is None:
            values = self.eager(examples)
        for name, value in values.items():
            if self.reason is None and not isinstance(value, self.device.xp.ndarray):
                self.give_up('%s is a value on the host, which a replay would repeat' % name)
        return values

    def values(self, arrays, n_graphs=None):
        return {
            name: value.array if isinstance(value, chainer.Variable) else value
            for name, value in self._called(arrays).items()
        }


class _Reports(_Evaluation):
    """What the function reports."""

    def _called(self, arrays):
        reported = {}
        with reporter.get_current_reporter().scope(reported):
            self._function(*arrays)
        return reported


class _Outputs(_Evaluation):
    """What the function returns for all columns but the last, and the last, the labels."""

    def _called(self, arrays):
        return {'y': self._function(*arrays[:-1]), 't': arrays[-1]}


class _Captured:
    """The loop over the batches, in place of that of an evaluator."""

    converter: Callable
    device: chainer.backend.Device
    eval_func: Callable
    eval_hook: Callable
    name: str
    _iterators: dict
    _targets: dict
    _evaluation, _parts, _has_trainer = None, (), False

    def _results(self, kind):
        """Yield name -> value for each batch, from a `kind` of evaluation.

        The next batch may overwrite the arrays.
        """
        if self.eval_hook:
            self.eval_hook(self)
        iterator, target = self._iterators['main'], self._targets['main']
        # Users may assign to the attributes between two evaluations.
        parts = iterator, target, self.eval_func, self.converter, self.name
        if self._parts != parts:
            self._close()
            function, dataset = self.eval_func or target, getattr(iterator, 'dataset', None)
            self._evaluation, self._parts = kind(target, function, self.converter, dataset), parts
        iterator.reset()
        with (
            chainer.using_device(self.device),
            chainer.using_config('train', False),
            chainer.no_backprop_mode(),
        ):
            evaluation = self._evaluation
            evaluation.watched = None  # other code has run since
            while True:
                is_known = evaluation.watched is not None
                try:
                    examples = evaluation.examples.next(
                        iterator, self.converter, self._has_trainer, is_known
                    )
                except StopIteration:
                    return
                yield evaluation.evaluate(examples)

    def __call__(self, trainer=None):
        self._has_trainer = trainer is not None  # which says when the training ends
        return super().__call__(trainer)

    def __reduce_ex__(self, protocol):
        """A copy is of the class that this had, and captured at its first call."""
        own = '_evaluation', '_parts', '_has_trainer'
        state = {name: value for name, value in vars(self).items() if name not in own}
        return _made, (type(self).__bases__[1], state)

    def finalize(self):
        super().finalize()
        self._close()

    def _close(self):
        if self._evaluation is not None:
            self._evaluation.close()
        self._evaluation, self._parts = None, ()


def _made(kind, state):
    evaluator = kind.__new__(kind)
    vars(evaluator).update(state)
    return evaluator


class _CapturedReports(_Captured):
    def evaluate(self):
        summary = reporter.DictSummary()
        for reported in self._results(_Reports):
            summary.add(reported)
        return summary.compute_mean()


class _CapturedOutputs(_Captured):
    """Copies what was predicted to the host once, at the end."""

    metrics_fun: dict[str, Callable]

    def evaluate(self):
        results = [state.copies(values) for values in self._results(_Outputs)]
        with chainer.using_device(self.device):
            y, t = (_on_host([result[name] for result in results]) for name in 'yt')
        metrics = {name: metric(y, t) for name, metric in self.metrics_fun.items()}
        observation = {}
        with reporter.report_scope(observation):
            reporter.report(metrics, self._targets['main'])
        return observation


def _on_host(arrays):
    """Return all elements of arrays on one device, one after the other, in a NumPy array."""
    xp = chainer.backend.get_array_module(*arrays)
    return cuda.to_cpu(xp.concatenate([array.ravel() for array in arrays]))


@functools.lru_cache(maxsize=None)
def _captured_form(kind):
    """Return the captured form of a class of evaluators; None: it has none.

    Subclasses have none: they may override what is replaced here.
    """
    if kind is Evaluator:
        loop = _CapturedReports
    elif '%s.%s' % (kind.__module__, kind.__qualname__) in BATCH_EVALUATORS:
        loop = _CapturedOutputs
    else:
        return None
    return type('Captured' + kind.__name__, (loop, kind), {})


def capture_evaluator(evaluator: Evaluator) -> None:
    """Swap an evaluator that can be captured, as `sparsify` swaps links.

    It is left as it is where its class or converter is a user's, it is for no GPU, or it shows a
    progress bar.
    """
    captured = _captured_form(type(evaluator))
    if (
        captured is not None
        and evaluator.device is not None
        and evaluator.device.xp is cuda.cupy
        and evaluator.get_target('main').device == evaluator.device
        and type(evaluator.converter) is CSRConverter
        and hasattr(evaluator.get_iterator('main'), 'reset')
        and not evaluator._progress_bar
    ):
        evaluator.__class__ = captured
