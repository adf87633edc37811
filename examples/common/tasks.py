"""The two tasks: regression and classification. What is the model, the loss, a good answer?"""

import contextlib
import io

import chainer_bspmm
import chainer.functions as F
import numpy
from chainer.training import extensions
from chainer_bspmm.dataset import SparseDataset
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links.scaler.standard_scaler import StandardScaler
from chainer_chemistry.models.prediction import Classifier, Regressor, set_up_predictor
from chainer_chemistry.training.extensions import BatchEvaluator
from scipy.stats import rankdata

# Upstream's methods that chainer_bspmm swaps, of those with an adjacency matrix.
METHODS = (
    *('rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp', 'relgat', 'gnnfilm'),
    *('rsgcn_gwm', 'ggnn_gwm', 'gin_gwm', 'nfp_gwm'),
)
# Those with a dropout of one half by default: good for classification, in regression mostly noise.
WITH_DROPOUT = ('rsgcn', 'gin')
LAYOUTS = ('folded', 'packed', 'padded')


def build_predictor(settings, dense, n_out, **options):
    """Build upstream's model, and swap in the sparse products unless `dense`."""
    with contextlib.redirect_stdout(io.StringIO()):  # which prints what it builds
        predictor = set_up_predictor(
            settings['method'], settings['unit_num'], settings['conv_layers'], n_out, **options
        )
    return predictor if dense else chainer_bspmm.sparsify(predictor)


def converter_of(layout, padded_to=None):
    """Return the converter of a layout; ``'dense'`` is upstream's."""
    if layout == 'dense':
        return dense_concat_mols
    return chainer_bspmm.CSRConverter(layout, padded_to=padded_to)


def labels_of(examples):
    """Return the labels of examples, (M, T) float64."""
    if isinstance(examples, SparseDataset):
        return examples.get_datasets()[-1].astype(numpy.float64)
    return numpy.array([example[-1] for example in examples], dtype=numpy.float64)


class Task:
    """What is learned: `names` of the targets, and {name: unit}, which is printed."""

    answer = 'predicted'  # what a prediction is called
    postprocess_fn = None  # of the model's output, for a prediction

    def __init__(self, names, units=None):
        self.names = list(names)
        self.units = units or {}

    def titles(self):
        """Return the names of the targets with their units."""
        return ['%s (%s)' % (n, self.units[n]) if n in self.units else n for n in self.names]

    def column_titles(self, name):
        """Return what the columns of predicted and of true values are called in a CSV file."""
        unit = ' [%s]' % self.units[name] if name in self.units else ''
        return ['%s %s%s' % (name, what, unit) for what in (self.answer, 'true')]

    def predict(self, model, dataset, converter, batchsize):
        """Predict (M, T) float32: in the targets' units, or the probability of each label."""
        return model.predict(
            dataset,
            batchsize=batchsize,
            converter=lambda batch, device=None: tuple(converter(batch, device)[:-1]),  # no labels
            postprocess_fn=self.postprocess_fn,
        )


class Regression(Task):
    """Numbers, learned with the mean squared error; reported as the mean absolute error (MAE)."""

    kind = 'regression'
    expected = 'a finite number'
    may_be_missing = False
    log_keys = ('main/loss', 'validation/main/loss', 'main/mae', 'validation/main/mae')
    best = 'validation/main/loss', -1  # the log's value, and -1 where less is better
    evaluator = extensions.Evaluator

    def is_good(self, values):
        """Return for an array of values from a file which are labels: finite in float32."""
        return numpy.abs(values) <= numpy.finfo(numpy.float32).max

    def labels(self, values):
        """Return the labels of values from a file, (M, T) float32."""
        return values.astype(numpy.float32)

    def build(self, settings, dense, train_labels=None):
        """Build the model; without `train_labels` its parameters are about to be loaded.

        The predictor answers in the targets' own units, the loss is in units of each target's
        standard deviation: one rotational constant in GHz would outweigh all energies in hartree.
        The log's 'mae' is in the target's unit for one target, else in standard deviations.
        """
        scaler = StandardScaler()
        if train_labels is not None:
            # In float64: a float32 sum over 90,000 energies of -400 hartree loses their spread.
            scaler.mean = train_labels.mean(axis=0).astype(numpy.float32)
            scaler.std = train_labels.std(axis=0).astype(numpy.float32)
        options = {'label_scaler': scaler}
        if settings['method'] in WITH_DROPOUT:
            options['conv_kwargs'] = {'dropout_ratio': 0.0}
        predictor = build_predictor(settings, dense, len(self.names), **options)

        def scaled(lossfun):
            return lambda y, t: lossfun(scaler.transform(y), scaler.transform(t))

        mae = F.mean_absolute_error if len(self.names) == 1 else scaled(F.mean_absolute_error)
        lossfun = scaled(F.mean_squared_error)
        return Regressor(predictor, lossfun=lossfun, metrics_fun={'mae': mae})

    def panels(self):
        """Return [(key in the log, name of the axis)] of the learning curve."""
        unit = self.units.get(self.names[0]) if len(self.names) == 1 else 'standard deviations'
        mae = 'mean absolute error' + (' [%s]' % unit if unit else '')
        return [('loss', 'mean squared error / variance'), ('mae', mae)]

    def report(self, labels, predictions, train_labels=None):
        """Return lines and {'MAE': {target: ...}} of predictions whose truth is known.

        With training labels also 'MAE of the mean alone', of always answering their mean.
        """
        lines = []
        maes = {}
        of_mean = {}
        for i, (name, t, y) in enumerate(zip(self.names, labels.T, predictions.T)):
            known = numpy.isfinite(t)
            if not known.any():
                continue
            unit = self.units[name] + ' ' if name in self.units else ''
            maes[name] = float(numpy.abs(y[known] - t[known]).mean())
            line = 'MAE of %s: %.6g %s(%d molecules' % (name, maes[name], unit, known.sum())
            if train_labels is not None:
                of_mean[name] = float(numpy.abs(train_labels[:, i].mean() - t[known]).mean())
                line += '; always the mean: %.6g' % of_mean[name]
            lines.append(line + ')')
        return lines, {'MAE': maes, **({'MAE of the mean alone': of_mean} if of_mean else {})}


def roc_aucs(labels, scores):
    """Return the area under the ROC curve of each label, (T,) float64.

    Labels (M, T) are 1 or 0; negative ones and NaN are missing and left out. A label that has not
    both a 1 and a 0, or a score that is NaN, has none: NaN.
    """
    areas = []
    for t, y in zip(labels.T, scores.T):
        known = t >= 0  # not so for NaN
        t, y = t[known], y[known]
        n_ones = numpy.count_nonzero(t)
        n_pairs = n_ones * (t.size - n_ones)
        # The share of pairs of a 1 and a 0 in which the 1 has the larger score (Mann, Whitney
        # 1947); equal scores share their ranks.
        n_larger = rankdata(y)[t > 0].sum() - n_ones * (n_ones + 1) / 2
        areas.append(n_larger / n_pairs if n_pairs and not numpy.isnan(y).any() else numpy.nan)
    return numpy.array(areas)


def mean_of_known(areas):
    """Return the mean of what is no NaN, NaN if there is nothing."""
    areas = areas[numpy.isfinite(areas)]
    return float(areas.mean()) if areas.size else float('nan')


class Classification(Task):
    """Labels that are yes, no or unknown; reported as the area under the ROC curve (ROC-AUC)."""

    kind = 'classification'
    answer = 'probability'
    postprocess_fn = staticmethod(F.sigmoid)
    expected = '0, 1 or nothing'
    may_be_missing = True
    log_keys = ('main/loss', 'validation/main/loss', 'validation/main/roc_auc')
    best = 'validation/main/roc_auc', 1

    def is_good(self, values):
        """Return for an array of values from a file which are labels."""
        return (values == 0) | (values == 1)

    def labels(self, values):
        """Return the labels of values from a file, (M, T) int32, -1 where one is missing."""
        return numpy.where(numpy.isnan(values), -1, values).astype(numpy.int32)

    def build(self, settings, dense, train_labels=None):
        """Build the model; the loss passes over labels of -1."""
        predictor = build_predictor(settings, dense, len(self.names))
        return Classifier(predictor, lossfun=F.sigmoid_cross_entropy, metrics_fun=None)

    def evaluator(self, iterator, model, **options):
        """Make the extension that reports the loss, and the mean over the labels of ROC-AUC."""
        shape = -1, len(self.names)

        def loss(y, t):
            return float(model.lossfun(y.reshape(shape), t.reshape(shape)).array)

        def roc_auc(y, t):
            return mean_of_known(roc_aucs(t.reshape(shape), y.reshape(shape)))

        return BatchEvaluator(
            iterator,
            model,
            eval_func=model.predictor,
            metrics_fun={'loss': loss, 'roc_auc': roc_auc},
            **options,
        )

    def panels(self):
        """Return [(key in the log, name of the axis)] of the learning curve."""
        return [('loss', 'cross entropy'), ('roc_auc', 'ROC-AUC, mean of the labels')]

    def report(self, labels, predictions, train_labels=None):
        """Return lines and {'ROC-AUC': {label: ...}, 'mean ROC-AUC': ...}, NaN where undefined."""
        areas = roc_aucs(labels, predictions)
        lines = [
            'ROC-AUC of %s: %.4f (%d molecules, %d positive)'
            % (name, area, (t >= 0).sum(), (t == 1).sum())
            for name, area, t in zip(self.names, areas, labels.T)
            if (t >= 0).any()
        ]
        if lines:
            lines.append('mean ROC-AUC: %.4f' % mean_of_known(areas))
        per_label = dict(zip(self.names, areas.tolist()))
        return lines, {'ROC-AUC': per_label, 'mean ROC-AUC': mean_of_known(areas)}


TASKS = {task.kind: task for task in (Regression, Classification)}
