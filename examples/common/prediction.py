"""Predict with a model trained by a train_*.py: what every predict_*.py does."""

import os
import sys

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import numpy
import pandas
from common import data
from common import files
from common.arguments import get_device
from common.tasks import converter_of

AS_DENSE = 'folded'  # the layout with the results of upstream's dense batches


def load(folder, script, task_of, dense, device):
    """Load what a training left in a folder.

    Args:
        folder (str): `--in-dir`.
        script (str): name of the script that trains.
        task_of (callable): settings of the training -> Regression or Classification.
        dense (bool): into upstream's dense model instead of the sparse one.
        device (chainer.backend.Device): of the model; it becomes the current one.

    Returns:
        tuple: settings (dict), task, model.
    """
    device.use()
    settings = files.load_settings(folder, script)
    if settings['script'] != script:
        raise data.DataError(
            '--in-dir: %s is an output folder of %s, expected one of %s'
            % (folder, settings['script'], script)
        )
    task = task_of(settings)
    return settings, task, files.load_model(folder, task, settings, dense, device)


def converter_for(settings, layout=None, dense=False):
    """Return the converter of a prediction; warn where the model was trained on other batches.

    Args:
        settings (dict): of the training.
        layout (str or None): None means the training's.
        dense (bool): predict with upstream's dense model.
    """
    trained = settings['layout'] == 'packed', settings['padded_to']
    layout = 'dense' if dense else layout or settings['layout']
    if layout == 'dense' and not dense:
        layout = AS_DENSE
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


def molecules(args, settings, task, read, failed_file):
    """Return what to predict: (data set, table, the rows of the table that the data set holds)."""
    method = settings['method']
    if args.smiles:
        if settings['padded_to'] is None and settings['layout'] != 'packed':
            print(
                'Note: a prediction may depend on the molecules given beside it, as in Chainer '
                'Chemistry; not if the model is trained with --padded-to largest',
                file=sys.stderr,
            )
        table = data.typed_smiles(args.smiles, task.names)
        dataset, kept, failures = data.preprocess(table, method, task.labels(table), args.dense)
        data.report_failures(failures, failed_file)
        return dataset, table, kept
    if args.data:
        description, table = read(args.data, settings, task, 'keep')
        return data.load(
            description, table, task, method, -1, failed_file, args.dense, not args.no_cache
        )
    missing = 'skip' if settings['skip_missing'] else 'refuse'
    description, table = read(settings['data'], settings, task, missing)
    dataset, table, kept = data.load(
        description,
        table,
        task,
        method,
        settings['num_data'],
        failed_file,
        args.dense,
        not args.no_cache,
    )
    if len(dataset) != settings['n_molecules']:
        raise data.DataError(
            '%s had %d molecules when the model was trained and has %d now: '
            'the test part cannot be found again'
            % (settings['data'], settings['n_molecules'], len(dataset))
        )
    if settings.get('digest', data.digest(table, task)) != data.digest(table, task):
        raise data.DataError(
            '%s has other molecules or labels, or in another order, than when the model was '
            'trained: the test part cannot be found again' % settings['data']
        )
    test = data.split_indices(len(dataset), settings['train_data_ratio'], settings['seed'])[2]
    print('%d molecules of the test part' % len(test))
    rows = [kept[i] for i in test]
    return dataset[test], table.iloc[rows].reset_index(drop=True), list(range(len(rows)))


def predict(args, script, task_of, read):
    """Predict, print the errors where the truth is known, and write the CSV file.

    Args:
        args (argparse.Namespace): the options, those of `arguments.add_prediction_arguments`.
        script (str): name of the script that trains.
        task_of (callable): settings of the training -> Regression or Classification.
        read (callable): (data, settings, task, missing) -> (description, table); `missing` as of
            `data.read_csv`.

    Returns:
        int: the exit status.
    """
    settings, task, model = load(args.in_dir, script, task_of, args.dense, get_device(args.device))
    in_folder = os.path.join(args.in_dir, 'predictions.csv')
    out = args.out or in_folder
    folder = os.path.dirname(out) or '.'
    if not os.path.isdir(folder):
        raise data.DataError('--out: no such folder: %s' % folder)
    if os.path.isdir(out) or not os.access(out if os.path.exists(out) else folder, os.W_OK):
        raise data.DataError('--out: cannot write the file %s' % out)
    # Neither the training's file nor another one in the folder, nor one beside /dev/stdout.
    is_special = os.path.exists(out) and not os.path.isfile(out)
    failed_file = os.path.splitext(in_folder if is_special else out)[0] + '_failed.csv'
    sources = [*filter(None, (args.data, settings['data'])), *files.of_run(args.in_dir)]
    for path in (out, failed_file):
        if files.is_one_of(path, sources):
            raise data.DataError('--out: %s holds the data that are read' % path)
    dataset, table, kept = molecules(args, settings, task, read, failed_file)

    others = pandas.DataFrame(index=table.index)
    if not args.smiles:
        others = data.other_columns(args.data or settings['data'], table)
    for name in task.names:
        predicted, true = task.column_titles(name)
        for title in (predicted, true) if table[name].notna().any() else (predicted,):
            if title in others:
                raise data.DataError(
                    'the data have a column %r, which the predictions would replace; rename it'
                    % title
                )
    converter = converter_for(settings, args.layout, args.dense)
    predictions = task.predict(model, dataset, converter, args.batchsize)
    result = pandas.DataFrame({'smiles': table['smiles']}).join(others)
    for name, values in zip(task.names, predictions.T):
        predicted, true = task.column_titles(name)
        # One row for each molecule of the input, empty where there is no prediction.
        result[predicted] = pandas.Series(values.astype(numpy.float64), index=kept).reindex(
            table.index
        )
        if table[name].notna().any():
            result[true] = table[name]
    with files.replacing(out) as new, files.table_file(new) as file:
        result.to_csv(file, index=False, float_format='%.7g')
    if args.smiles:
        print(result.to_string(index=False))
    for line in task.prediction_report(table[task.names].to_numpy()[kept], predictions):
        print(line)
    print('Predictions: %s' % out)
    return 0
