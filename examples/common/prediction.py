"""Predict with a model trained by a train_*.py: what every predict_*.py does."""

import os
import sys

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import numpy
import pandas
from common import data
from common import files
from common.arguments import get_device
from common.data import DataError
from common.tasks import converter_of
from common.tasks import METHODS


def load(args, script, task_of, device, dense=False):
    """Return (settings (dict), task, model) of the training in `args.in_dir`.

    `script` is the name of the one that trains, `task_of` makes the task of its settings, `dense`
    asks for upstream's model, and `device` becomes the current one.
    """
    device.use()
    settings = files.load_settings(args.in_dir, script)
    if settings['method'] not in METHODS:
        raise DataError(
            '%s: unknown method %r; expected one of %s'
            % (args.in_dir, settings['method'], ', '.join(METHODS))
        )
    task = task_of(settings)
    model = task.build(settings, dense)
    name = files.BEST_FILE if args.model == 'best' else files.MODEL_FILE
    files.load_npz(os.path.join(args.in_dir, name), model)
    model.to_device(device)
    return settings, task, model


def converter_for(settings, layout=None, dense=False):
    """Return the converter of a prediction; warn where the model was trained on other batches."""
    if dense:
        layout = 'dense'
    elif layout is None:  # folded batches have the results of dense ones
        layout = 'folded' if settings['layout'] == 'dense' else settings['layout']
    trained = settings['layout'] == 'packed', settings['padded_to']
    padded_to = settings['padded_to'] if layout == 'folded' else None
    if (layout == 'packed', padded_to) != trained:
        print(
            'Warning: the model was trained on %s batches%s; predictions from %s ones may differ'
            % (
                settings['layout'],
                ' of %d atoms a molecule' % trained[1] if trained[1] else '',
                layout,
            ),
            file=sys.stderr,
        )
    return converter_of(layout, padded_to)


def from_smiles(args, settings, task):
    """Return what :func:`data.preprocess` makes of ``--smiles``, after the rows (data.Rows)."""
    if settings['padded_to'] is None and settings['layout'] != 'packed':
        print(
            'Note: a prediction may depend on the molecules given beside it, as in Chainer '
            'Chemistry; not if the model is trained with --padded-to largest',
            file=sys.stderr,
        )
    rows = data.typed_smiles(args.smiles, len(task.names))
    return rows, *data.preprocess(rows, settings['method'], task.labels(rows.labels), args.dense)


def test_part(settings, task, read, options):
    """Return the test molecules of the training: (data set, rows, kept, failures)."""
    missing = 'skip' if settings['skip_missing'] else 'refuse'
    description, rows = read(settings['data'], settings, task, missing)
    dataset, rows, kept, failures = data.load(
        description, rows, task, settings['method'], settings['num_data'], *options
    )
    if len(dataset) != settings['n_molecules'] or data.digest(rows) != settings['digest']:
        raise DataError(
            '%s has other molecules or labels, or in another order, than when the model was '
            'trained: the test part cannot be found again' % settings['data']
        )
    test = data.split(rows.smiles[kept], settings)[2]
    print('%d molecules of the test part' % len(test))
    return dataset[test], rows.take(kept[test]), numpy.arange(len(test)), failures


def predict(args, script, task_of, read):
    """Predict, print the errors where the truth is known, and write the CSV file.

    `task_of` makes the task of the settings of `script`; `read` takes (data, settings, task,
    missing) and returns (description, rows with all columns).
    """
    out = args.out
    if out is None and not args.smiles:
        out = os.path.join(args.in_dir, 'predictions.csv')
    settings, task, model = load(args, script, task_of, get_device(args.device), args.dense)
    failed_file = None
    if out is not None:
        is_special = os.path.exists(out) and not os.path.isfile(out)  # such as /dev/stdout
        beside = os.path.join(args.in_dir, 'predictions.csv') if is_special else out
        failed_file = os.path.splitext(beside)[0] + '_failed.csv'
        for path in (out, failed_file):
            files.check_new_file(path, args.force)
    options = args.dense, not args.no_cache
    if args.smiles:
        rows, dataset, kept, failures = from_smiles(args, settings, task)
    elif args.data:
        description, rows = read(args.data, settings, task, 'keep')
        dataset, rows, kept, failures = data.load(
            description, rows, task, settings['method'], -1, *options
        )
    else:
        dataset, rows, kept, failures = test_part(settings, task, read, options)
    others = rows.others.reset_index(drop=True).drop(columns='smiles', errors='ignore')
    has_truth = ~numpy.isnan(rows.labels).all(axis=0)
    titles = [task.column_titles(name)[: 1 + known] for name, known in zip(task.names, has_truth)]
    for title in sum(titles, []):
        if title in others:
            raise DataError(
                'the data have a column %r, which the predictions would replace; rename it' % title
            )
    files.report_failures(failures, failed_file)
    converter = converter_for(settings, args.layout, args.dense)
    predictions = task.predict(model, dataset, converter, args.batchsize)
    # One row for each molecule of the input, empty where there is no prediction.
    every = numpy.full(rows.labels.shape, numpy.nan)
    every[kept] = predictions
    result = pandas.DataFrame({'smiles': rows.smiles}).join(others)
    for i, of_label in enumerate(titles):
        for title, values in zip(of_label, (every, rows.labels)):
            result[title] = values[:, i]
    if args.smiles:
        print(result.to_string(index=False))
    for line in task.report(rows.labels[kept], predictions)[0]:
        print(line)
    if out is not None:
        files.write_table(out, result)
        print('Predictions: %s' % out)
    return 0
