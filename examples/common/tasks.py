"""The two tasks: regression and classification. What is the model, the loss, a good answer?"""

import contextlib
import functools
import io

import chainer_bspmm  # first: lets Chainer import on today's Python and NumPy
import chainer.functions as F
import numpy
from chainer.training import extensions
from chainer_bspmm.dataset import SparseDataset
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links.scaler.standard_scaler import StandardScaler
from chainer_chemistry.models.prediction import Classifier
from chainer_chemistry.models.prediction import Regressor
from chainer_chemistry.models.prediction import set_up_predictor
from chainer_chemistry.training.extensions import BatchEvaluator

# Upstream's methods whose adjacency is a matrix; the others have no sparse product.
METHODS = (
    'rsgcn',
    'relgcn',
    'ggnn',
    'gin',
    'nfp',
    'relgat',
    'gnnfilm',
    'rsgcn_gwm',
    'ggnn_gwm',
    'gin_gwm',
    'nfp_gwm',
)
# Those with a dropout of one half by default: good for classification, in regression mostly noise.
WITH_DROPOUT = ('rsgcn', 'gin')


def dense_predictor(method, unit_num, conv_layers, n_out, **options):
    """Set up upstream's predictor without its printed messages."""
    with contextlib.redirect_stdout(io.StringIO()):
        return set_up_predictor(method, unit_num, conv_layers, n_out, **options)


@functools.lru_cache(maxsize=None)
def supported_methods():
    """Return those of METHODS that chainer_bspmm can swap, found by trying small ones (20 ms)."""
    supported = []
    for method in METHODS:
        with contextlib.suppress(ValueError):
            chainer_bspmm.sparsify(dense_predictor(method, 2, 1, 1))
            supported.append(method)
    return supported


def build_predictor(settings, dense, n_out, **options):
    """Build upstream's model, and swap in the sparse products unless `dense`.

    Args:
        settings (dict): 'method', 'unit_num', 'conv_layers'.
        dense (bool): keep upstream's dense model.
        n_out (int): number of labels.
        options: further arguments of upstream's `set_up_predictor`.
    """
    predictor = dense_predictor(
        settings['method'], settings['unit_num'], settings['conv_layers'], n_out, **options
    )
    return predictor if dense else chainer_bspmm.sparsify(predictor)


LAYOUTS = ('folded', 'packed', 'padded')


def converter_of(layout, padded_to=None):
    """Return the converter of a layout; ``'dense'`` is upstream's.

    Args:
        layout (str): ``'dense'`` or one of LAYOUTS.
        padded_to (int or None): atoms of every molecule of a folded batch; None means those of its
            largest.
    """
    if layout == 'dense':
        return dense_concat_mols
    return chainer_bspmm.CSRConverter(layout, padded_to=padded_to)


def inputs_converter(converter):
    """Return a converter that leaves out the labels, the last column, for prediction."""

    def inputs_only(batch, device=None):
        return tuple(converter(batch, device)[:-1])

    return inputs_only


def labels_of(examples):
    """Return the labels of examples, (M, T) float64."""
    if isinstance(examples, SparseDataset):
        return examples.get_datasets()[-1].astype(numpy.float64)
    return numpy.array([example[-1] for example in examples], dtype=numpy.float64)


class Regression:
    """Numbers, learned with the mean squared error; reported as the mean absolute error (MAE).

    Args:
        names (list of str): the targets.
        units (dict or None): {target: unit}.
    """

    kind = 'regression'
    expected = 'a finite number'
    may_be_missing = False
    log_keys = ('main/loss', 'validation/main/loss', 'main/mae', 'validation/main/mae')

    def __init__(self, names, units=None):
        self.names = list(names)
        self.units = units or {}

    def is_good(self, values):
        """Return for an array of values from a file which are labels."""
        return numpy.isfinite(values)

    def labels(self, table):
        """Return the labels of a table, (M, T) float32."""
        return table[self.names].to_numpy(dtype=numpy.float32)

    def titles(self):
        """Return the names of the targets with their units."""
        return [
            '%s (%s)' % (name, self.units[name]) if name in self.units else name
            for name in self.names
        ]

    def build(self, settings, dense, train_labels=None):
        """Build the model; without `train_labels` its parameters are about to be loaded.

        The predictor answers in the targets' own units, the loss is in units of each target's
        standard deviation: one rotational constant in GHz would outweigh all energies in hartree.

        Returns:
            Regressor: its log value 'mae' is in the target's unit for one target, and in standard
            deviations for all of them together.
        """
        scaler = StandardScaler()
        if train_labels is not None:
            # In float64: a float32 sum over 90,000 energies of -400 hartree loses their spread.
            scaler.fit(train_labels)
            scaler.mean = scaler.mean.astype(numpy.float32)
            scaler.std = scaler.std.astype(numpy.float32)
        options = {'label_scaler': scaler}
        if settings['method'] in WITH_DROPOUT:
            options['conv_kwargs'] = {'dropout_ratio': 0.0}
        predictor = build_predictor(settings, dense, len(self.names), **options)

        def scaled(lossfun):
            return lambda y, t: lossfun(scaler.transform(y), scaler.transform(t))

        mae = F.mean_absolute_error
        return Regressor(
            predictor,
            lossfun=scaled(F.mean_squared_error),
            metrics_fun={'mae': mae if len(self.names) == 1 else scaled(mae)},
        )

    evaluator = extensions.Evaluator

    def predict(self, model, dataset, converter, batchsize):
        """Predict (M, T) float32, in the targets' units."""
        return model.predict(dataset, batchsize=batchsize, converter=inputs_converter(converter))

    def baseline(self, model, train_labels, labels):
        """Return {'loss': ..., 'mae': ...} of always answering the mean of the training labels."""
        t = labels.astype(numpy.float32)
        y = numpy.broadcast_to(train_labels.mean(axis=0).astype(numpy.float32), t.shape)
        return {
            'loss': float(model.lossfun(y, t).array),
            'mae': float(model.metrics_fun['mae'](y, t).array),
        }

    def panels(self):
        """Return [(key in the log, name of the axis)] of the learning curve."""
        unit = self.units.get(self.names[0], '')
        if len(self.names) > 1:
            unit = 'standard deviations'
        return [
            ('loss', 'mean squared error / variance'),
            ('mae', 'mean absolute error' + (' [%s]' % unit if unit else '')),
        ]

    def test_report(self, labels, predictions, train_labels):
        """Compare test errors with those of always answering the mean of the training labels.

        Returns:
            tuple: (lines, {'MAE': {target: ...}, 'MAE of the mean alone': {target: ...}}).
        """
        mae = numpy.abs(predictions - labels).mean(axis=0)
        baseline = numpy.abs(train_labels.mean(axis=0) - labels).mean(axis=0)
        width = max(6, *map(len, self.names))
        lines = [
            '%-*s  %10s  %-11s  %22s  %5s'
            % (width, 'target', 'test MAE', 'unit', 'MAE of the mean alone', 'ratio')
        ]
        for name, error, base in zip(self.names, mae, baseline):
            lines.append(
                '%-*s  %10.5g  %-11s  %22.5g  %5.2f'
                % (
                    width,
                    name,
                    error,
                    self.units.get(name, ''),
                    base,
                    error / base if base else numpy.nan,
                )
            )
        return lines, {
            'MAE': dict(zip(self.names, mae.tolist())),
            'MAE of the mean alone': dict(zip(self.names, baseline.tolist())),
        }

    def prediction_report(self, labels, predictions):
        """Return one line for each target of which the truth is known for some molecules."""
        lines = []
        for name, t, y in zip(self.names, labels.T, predictions.T):
            known = numpy.isfinite(t)
            if known.any():
                lines.append(
                    'MAE of %s: %.6g %s(%d molecules)'
                    % (
                        name,
                        numpy.abs(y[known] - t[known]).mean(),
                        self.units[name] + ' ' if name in self.units else '',
                        known.sum(),
                    )
                )
        return lines

    def column_titles(self, name):
        """Return what the columns of predicted and of true values are called in a CSV file."""
        unit = ' [%s]' % self.units[name] if name in self.units else ''
        return '%s predicted%s' % (name, unit), '%s true%s' % (name, unit)


def roc_aucs(labels, scores):
    """Return the area under the ROC curve of each label, (T,) float64.

    Args:
        labels (numpy.ndarray): (M, T): 1, 0; anything negative or NaN is missing and left out.
        scores (numpy.ndarray): (M, T), larger means more likely 1.

    Returns:
        numpy.ndarray: NaN for a label that has not both a 1 and a 0, or a score that is NaN.
    """
    areas = []
    for t, y in zip(labels.T, scores.T):
        known = t >= 0  # not so for NaN
        t, y = t[known], y[known]
        n_ones = numpy.count_nonzero(t)
        n_pairs = n_ones * (t.size - n_ones)
        if not n_pairs or numpy.isnan(y).any():
            areas.append(numpy.nan)
            continue
        # The share of pairs of a 1 and a 0 in which the 1 has the larger score (Mann, Whitney
        # 1947); equal scores share their places.
        _, place, counts = numpy.unique(y, return_inverse=True, return_counts=True)
        ranks = (counts.cumsum() - (counts - 1) / 2)[place]
        areas.append((ranks[t > 0].sum() - n_ones * (n_ones + 1) / 2) / n_pairs)
    return numpy.array(areas)


def mean_of_known(areas):
    """Return the mean of what is no NaN, NaN if there is nothing."""
    areas = areas[numpy.isfinite(areas)]
    return float(areas.mean()) if areas.size else float('nan')


class Classification:
    """Labels that are yes, no or unknown; reported as the area under the ROC curve (ROC-AUC).

    Args:
        names (list of str): the labels.
    """

    kind = 'classification'
    expected = '0, 1 or nothing'
    may_be_missing = True
    log_keys = ('main/loss', 'validation/main/loss', 'validation/main/roc_auc')

    def __init__(self, names):
        self.names = list(names)

    def is_good(self, values):
        """Return for an array of values from a file which are labels."""
        return (values == 0) | (values == 1)

    def labels(self, table):
        """Return the labels of a table, (M, T) int32, -1 where one is missing."""
        return table[self.names].fillna(-1).to_numpy(dtype=numpy.int32)

    def titles(self):
        """Return the names of the labels."""
        return self.names

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

    def predict(self, model, dataset, converter, batchsize):
        """Predict (M, T) float32: the probability that each label is 1."""
        return model.predict_proba(
            dataset,
            batchsize=batchsize,
            postprocess_fn=F.sigmoid,
            converter=inputs_converter(converter),
        )

    def baseline(self, model, train_labels, labels):
        """Return {'loss': ..., 'roc_auc': ...} of always answering the training data's share."""
        known = train_labels >= 0
        share = ((train_labels * known).sum(axis=0) + 0.5) / (known.sum(axis=0) + 1)  # never 0, 1
        y = numpy.broadcast_to(numpy.log(share / (1 - share)), labels.shape).astype(numpy.float32)
        return {'loss': float(model.lossfun(y, labels.astype(numpy.int32)).array), 'roc_auc': 0.5}

    def panels(self):
        """Return [(key in the log, name of the axis)] of the learning curve."""
        return [('loss', 'cross entropy'), ('roc_auc', 'ROC-AUC, mean of the labels')]

    def test_report(self, labels, predictions, train_labels):
        """Compare predictions with known labels.

        Returns:
            tuple: (lines, {'ROC-AUC': {label: ...}, 'mean ROC-AUC': ...}), None where undefined.
        """
        areas = roc_aucs(labels, predictions)
        width = max(len('mean'), *map(len, self.names))
        lines = ['%-*s  %12s  %9s  %9s' % (width, 'label', 'test ROC-AUC', 'positive', 'negative')]
        for name, area, t in zip(self.names, areas, labels.T):
            lines.append(
                '%-*s  %12.4f  %9d  %9d' % (width, name, area, (t == 1).sum(), (t == 0).sum())
            )
        lines.append('%-*s  %12.4f' % (width, 'mean', mean_of_known(areas)))
        numbers = [float(area) if numpy.isfinite(area) else None for area in areas]
        mean = mean_of_known(areas)
        return lines, {
            'ROC-AUC': dict(zip(self.names, numbers)),
            'mean ROC-AUC': mean if numpy.isfinite(mean) else None,
        }

    def prediction_report(self, labels, predictions):
        """Return one line for each label of which the truth is known, and their mean."""
        areas = roc_aucs(labels, predictions)
        lines = [
            'ROC-AUC of %s: %.4f (%d molecules)' % (name, area, (t >= 0).sum())
            for name, area, t in zip(self.names, areas, labels.T)
            if (t >= 0).any()
        ]
        if lines:
            lines.append('mean ROC-AUC: %.4f' % mean_of_known(areas))
        return lines

    def column_titles(self, name):
        """Return what the columns of predicted and of true values are called in a CSV file."""
        return '%s probability' % name, '%s true' % name


TASKS = {task.kind: task for task in (Regression, Classification)}
