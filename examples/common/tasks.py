"""The two tasks, regression and classification: their models, losses and errors."""

import contextlib
import io

import chainer_bspmm
import chainer.functions as F
import numpy
import pandas
from chainer.training import extensions
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links.scaler.standard_scaler import StandardScaler
from chainer_chemistry.models.prediction import Classifier, Regressor, set_up_predictor
from chainer_chemistry.training.extensions import BatchEvaluator

# Upstream's methods with an adjacency matrix whose models chainer_bspmm swaps.
METHODS = (
    *('rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp', 'relgat', 'gnnfilm'),
    *('rsgcn_gwm', 'ggnn_gwm', 'gin_gwm', 'nfp_gwm'),
)
# Methods with a dropout of one half by default, which is good for classification, but mostly noise
# in regression.
WITH_DROPOUT = ('rsgcn', 'gin')
TINY = numpy.finfo(numpy.float32).tiny  # float32 has too few digits below it
LAYOUTS = ('folded', 'packed', 'padded')


def build_predictor(settings, dense, n_out, **options):
    """Build upstream's model, and swap in the sparse products unless `dense`."""
    with contextlib.redirect_stdout(io.StringIO()):  # set_up_predictor prints a message
        predictor = set_up_predictor(
            settings['method'], settings['unit_num'], settings['conv_layers'], n_out, **options
        )
    return predictor if dense else chainer_bspmm.sparsify(predictor)


def converter_of(layout, padded_to=None):
    """Return the converter of a layout; ``'dense'`` is upstream's."""
    if layout == 'dense':
        return dense_concat_mols
    return chainer_bspmm.CSRConverter(layout, padded_to=padded_to)


class Task:
    """Targets that are learned: their `names`, and {name: unit}, for output."""

    answer = 'predicted'  # word for a prediction, in titles of columns
    number = '%.7g'  # format of a prediction
    postprocess_fn = None  # function from the model's output to a prediction

    def __init__(self, names, units=None):
        self.names = list(names)
        self.units = units or {}

    def titles(self):
        """Return the names of the targets with their units."""
        return ['%s (%s)' % (n, self.units[n]) if n in self.units else n for n in self.names]

    def column_title(self, name):
        """Return the title of the column of predicted values in a CSV file."""
        unit = ' [%s]' % self.units[name] if name in self.units else ''
        return '%s %s%s' % (name, self.answer, unit)

    def predict(self, model, dataset, converter, batchsize):
        """Predict the targets of a data set, (M, T), in their units or as probabilities."""
        return model.predict(
            dataset, batchsize=batchsize, converter=converter, postprocess_fn=self.postprocess_fn
        )


class CentredScaler(StandardScaler):
    """Chainer Chemistry's scaler, for labels from which their mean has been subtracted.

    Labels such as total energies may have a spread far below their mean: float32 has too few digits
    for both. So the mean (`offset`, always NumPy's) is subtracted in float64, and the labels and
    outputs of a model have the mean 0. A file has the mean of the original labels, as upstream's
    scaler writes it.
    """

    def __init__(self, labels=None):
        super().__init__()
        self.offset = None
        if labels is not None:
            self.offset = labels.mean(axis=0)
            self.mean = numpy.zeros(self.offset.shape, numpy.float32)
            deviations = labels.std(axis=0)  # upstream takes 1 for 0
            self.std = numpy.where(deviations < TINY, 0, deviations).astype(numpy.float32)

    def serialize(self, serializer):
        """Read or write the scaler with `offset` as the mean."""
        zeros = self.mean  # this array is kept, because captured steps have its address
        self.mean = self.offset
        super().serialize(serializer)
        self.offset = numpy.asarray(self.mean, numpy.float64)
        self.mean = numpy.zeros(self.offset.shape, numpy.float32) if zeros is None else zeros


class Regression(Task):
    """Numbers, learned with the mean squared error; reported as the mean absolute error (MAE)."""

    kind = 'regression'
    number = '%.12g'  # float64: the mean may take many of the digits
    expected = 'a finite number'
    may_be_missing = False
    log_keys = ('main/loss', 'validation/main/loss', 'main/mae', 'validation/main/mae')
    best = 'validation/main/loss', -1  # the log's value, and -1 where less is better
    evaluator = extensions.Evaluator

    def is_good(self, values):
        """Return a mask of the values from a file that can be labels: finite in float32."""
        return numpy.abs(values) <= numpy.finfo(numpy.float32).max

    def labels(self, values, model):
        """Convert values from a file to the labels that a model is trained on, (M, T) float32."""
        return (values - model.predictor.label_scaler.offset).astype(numpy.float32)

    def build(self, settings, dense, train_labels=None):
        """Build the model; without `train_labels` its parameters are about to be loaded.

        The output of the predictor is in the targets' own units, with the mean subtracted. The loss
        is in units of each target's standard deviation, because one rotational constant in GHz
        would outweigh all energies in hartree. The log's 'mae' is in the target's unit for one
        target, else in standard deviations.
        """
        scaler = CentredScaler(train_labels)
        predictor = build_predictor(
            settings,
            dense,
            len(self.names),
            label_scaler=scaler,
            conv_kwargs={'dropout_ratio': 0.0} if settings['method'] in WITH_DROPOUT else None,
        )

        def scaled(lossfun):
            return lambda y, t: lossfun(scaler.transform(y), scaler.transform(t))

        mae = F.mean_absolute_error if len(self.names) == 1 else scaled(F.mean_absolute_error)
        lossfun = scaled(F.mean_squared_error)
        return Regressor(predictor, lossfun=lossfun, metrics_fun={'mae': mae})

    def predict(self, model, dataset, converter, batchsize):
        """Predict (M, T) float64, in the targets' units."""
        centred = super().predict(model, dataset, converter, batchsize)
        return centred + model.predictor.label_scaler.offset

    def panels(self):
        """Return [(key in the log, name of the axis)] of the learning curve."""
        unit = self.units.get(self.names[0]) if len(self.names) == 1 else 'standard deviations'
        mae = 'mean absolute error' + (' [%s]' % unit if unit else '')
        return [('loss', 'mean squared error / variance'), ('mae', mae)]

    def report(self, labels, predictions, train_labels=None):
        """Return lines and {'MAE', 'RMSE', 'R2': {target: ...}} of molecules whose truth is known.

        With training labels there is also 'MAE of the mean alone', the error of always predicting
        their mean. R2 is NaN for a target whose labels are all the same in float32.
        """
        truth = pandas.DataFrame(labels, columns=self.names).dropna(axis=1, how='all')
        errors = pandas.DataFrame(predictions, columns=self.names)[truth.columns] - truth
        squares = (errors**2).mean()
        deviations = truth.std(ddof=0)
        found = pandas.DataFrame({'MAE': errors.abs().mean(), 'RMSE': squares**0.5})
        found['R2'] = 1 - squares / deviations.where(deviations >= TINY) ** 2
        if train_labels is not None:
            means = pandas.Series(train_labels.mean(axis=0), self.names)
            found['MAE of the mean alone'] = (truth - means).abs().mean()
        lines = []
        for name, (mae, rmse, r2, *alone) in found.iterrows():
            unit = ' ' + self.units[name] if name in self.units else ''
            line = 'MAE of %s: %.6g%s, RMSE %.6g, R2 %.4f' % (name, mae, unit, rmse, r2)
            line += ' (%d molecules' % truth[name].count()
            line += '; always the mean: MAE %.6g)' % alone[0] if alone else ')'
            lines.append(line)
        return lines, found.to_dict()


def roc_aucs(labels, scores):
    """Return the area under the ROC curve of each label, a Series.

    Labels (M, T) are 1 or 0; negative labels and NaN are missing and left out. The area is NaN for
    a label without both a 1 and a 0, or with a score that is NaN.
    """
    labels = pandas.DataFrame(labels)
    scores = pandas.DataFrame(scores).where(labels >= 0)  # False for NaN, too
    is_one = labels > 0
    n_ones = is_one.sum()
    n_pairs = n_ones * (scores.count() - n_ones)
    # The share of pairs of a 1 and a 0 in which the 1 has the larger score (Mann, Whitney 1947);
    # equal scores share their ranks.
    n_larger = scores.rank().where(is_one).sum() - n_ones * (n_ones + 1) / 2
    return (n_larger / n_pairs).where(scores.count() == (labels >= 0).sum())


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
        """Return a mask of the values from a file that can be labels."""
        return (values == 0) | (values == 1)

    def labels(self, values, model):
        """Convert values from a file to labels for the model, (M, T) int32, -1 if missing."""
        return numpy.where(numpy.isnan(values), -1, values).astype(numpy.int32)

    def build(self, settings, dense, train_labels=None):
        """Build the model; the loss ignores labels of -1."""
        predictor = build_predictor(settings, dense, len(self.names))
        return Classifier(predictor, lossfun=F.sigmoid_cross_entropy, metrics_fun=None)

    def evaluator(self, iterator, model, **options):
        """Make the extension that reports the loss, and the ROC-AUC as a mean over the labels."""
        shape = -1, len(self.names)

        return BatchEvaluator(
            iterator,
            model,
            eval_func=model.predictor,
            metrics_fun={
                'loss': lambda y, t: float(model.lossfun(y.reshape(shape), t.reshape(shape)).array),
                'roc_auc': lambda y, t: roc_aucs(t.reshape(shape), y.reshape(shape)).mean(),
            },
            **options,
        )

    def panels(self):
        """Return [(key in the log, name of the axis)] of the learning curve."""
        return [('loss', 'cross entropy'), ('roc_auc', 'ROC-AUC, mean of the labels')]

    def report(self, labels, predictions, train_labels=None):
        """Return lines and {'ROC-AUC': {label: ...}, 'mean ROC-AUC': ...}, NaN where undefined."""
        areas = roc_aucs(labels, predictions).set_axis(self.names)
        lines = [
            'ROC-AUC of %s: %.4f (%d molecules, %d positive)'
            % (name, area, (t >= 0).sum(), (t == 1).sum())
            for (name, area), t in zip(areas.items(), labels.T)
            if (t >= 0).any()
        ]
        if lines:
            lines.append('mean ROC-AUC: %.4f' % areas.mean())
        return lines, {'ROC-AUC': areas.to_dict(), 'mean ROC-AUC': areas.mean()}


TASKS = {task.kind: task for task in (Regression, Classification)}
