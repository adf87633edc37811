"""Chainer's and Chainer Chemistry's evaluators on captured batches."""

import functools
from collections.abc import Callable

import chainer
from chainer import reporter
from chainer.backends import cuda
from chainer.training.extensions import Evaluator

from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.training import snapshot
from chainer_bspmm.training.driver import is_on_gpu
from chainer_bspmm.training.prediction import PredictionDriver

# Chainer Chemistry's evaluators are listed by name, because importing their modules imports
# scikit-learn, which takes a second.
BATCH_EVALUATORS = {
    'chainer_chemistry.training.extensions.%s' % name
    for name in (
        'batch_evaluator.BatchEvaluator',
        'prc_auc_evaluator.PRCAUCEvaluator',
        'r2_score_evaluator.R2ScoreEvaluator',
        'roc_auc_evaluator.ROCAUCEvaluator',
    )
}


class _Evaluation(PredictionDriver):
    """Driver of evaluations; ``called(function, arrays)`` returns name -> value for a batch."""

    name = 'evaluation'
    who = 'GraphUpdater: an evaluator evaluates'
    raises_differences = False

    def __init__(self, called, *args):
        super().__init__(*args)
        self._called = called

    def evaluate(self, examples):
        """Return name -> value for a batch; the next batch may overwrite the arrays."""
        return self.values_of(self.conversion(examples))

    def values(self, arrays, n_graphs=None):
        return {
            name: chainer.as_array(value)
            for name, value in self._called(self._function, arrays).items()
        }


def _reported(function, arrays):
    reported = {}
    with reporter.get_current_reporter().scope(reported):
        function(*arrays)
    return reported


def _outputs_and_labels(function, arrays):
    return {'y': function(*arrays[:-1]), 't': arrays[-1]}


class _Captured:
    """Mixin: replacement of an evaluator's loop over the batches."""

    converter: Callable
    device: chainer.backend.Device
    eval_func: Callable
    eval_hook: Callable
    name: str
    _iterators: dict
    _targets: dict
    _evaluation = None
    _parts = ()
    _has_trainer = False

    def _results(self, called):
        """Yield name -> value for each batch; the next batch may overwrite the arrays."""
        if self.eval_hook:
            self.eval_hook(self)
        iterator, target = self._iterators['main'], self._targets['main']
        # Users may assign to the attributes between two evaluations.
        parts = iterator, target, self.eval_func, self.converter, self.name
        if self._parts != parts:
            self._close()
            function = self.eval_func or target
            dataset = getattr(iterator, 'dataset', None)
            self._evaluation = _Evaluation(called, target, function, self.converter, dataset)
            self._parts = parts
        iterator.reset()
        with (
            chainer.using_device(self.device),
            chainer.using_config('train', False),
            chainer.no_backprop_mode(),
        ):
            evaluation = self._evaluation
            evaluation.watched = None  # other code has run since the last evaluation
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
        self._has_trainer = trainer is not None  # a Trainer calls `finalize` at the end
        return super().__call__(trainer)

    def __reduce_ex__(self, protocol):
        """Copy as an evaluator of the original class, which is adopted again at its first call."""
        own = '_evaluation', '_parts', '_has_trainer'
        state = {name: value for name, value in vars(self).items() if name not in own}
        return object.__new__, (type(self).__bases__[1],), state

    def finalize(self):
        super().finalize()
        self._close()

    def _close(self):
        if self._evaluation is not None:
            self._evaluation.close()
        self._evaluation = None
        self._parts = ()


class _CapturedReports(_Captured):
    def evaluate(self):
        summary = reporter.DictSummary()
        for reported in self._results(_reported):
            summary.add(reported)
        return summary.compute_mean()


class _CapturedOutputs(_Captured):
    """Evaluation by metrics of all predictions, which are copied to the host once, at the end."""

    metrics_fun: dict[str, Callable]

    def evaluate(self):
        results = [snapshot.copies(values) for values in self._results(_outputs_and_labels)]
        with chainer.using_device(self.device):
            y, t = (_on_host([result[name] for result in results]) for name in 'yt')
        metrics = {name: metric(y, t) for name, metric in self.metrics_fun.items()}
        observation = {}
        with reporter.report_scope(observation):
            reporter.report(metrics, self._targets['main'])
        return observation


def _on_host(arrays):
    """Return the elements of several arrays on one device, concatenated in a NumPy array."""
    xp = chainer.backend.get_array_module(*arrays)
    return cuda.to_cpu(xp.concatenate([array.ravel() for array in arrays]))


@functools.lru_cache(maxsize=None)
def _captured_form(kind):
    """Return the captured form of a class, or None, as for a user's subclass of an evaluator."""
    loop = None
    if kind is Evaluator:
        loop = _CapturedReports
    elif '%s.%s' % (kind.__module__, kind.__qualname__) in BATCH_EVALUATORS:
        loop = _CapturedOutputs
    return loop and type('Captured' + kind.__name__, (loop, kind), {})


def capture_evaluator(evaluator: Evaluator) -> None:
    """Change the class of an evaluator to its captured form, if it can be captured."""
    captured = _captured_form(type(evaluator))
    if captured is None:
        return
    target = evaluator.get_all_targets().get('main')  # with an `eval_func`, Chainer needs none
    if (
        is_on_gpu(evaluator.device)
        and target is not None
        and target.device == evaluator.device
        and type(evaluator.converter) is CSRConverter
        and hasattr(evaluator.get_iterator('main'), 'reset')
        and not evaluator._progress_bar
    ):
        evaluator.__class__ = captured
