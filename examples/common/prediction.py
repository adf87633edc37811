"""Predict with a model trained by a train_*.py: what every predict_*.py does."""

import os
import sys

import numpy
import pandas
from common import arguments, data, files
from common.data import DataError
from common.tasks import converter_of


def load(args, source):
    """Return settings, task, model and converter of a training, by `source`, in `args.in_dir`."""
    device = arguments.use_device(args.device)
    settings = files.load_settings(args.in_dir, files.script_of(source))
    task = source.task_of(settings)
    model = task.build(settings, dense=False)
    name = files.BEST_FILE if args.model == 'best' else files.MODEL_FILE
    files.load_npz(os.path.join(args.in_dir, name), model)
    model.to_device(device)
    # Folded batches have the results of dense ones.
    layout = 'folded' if settings['layout'] == 'dense' else settings['layout']
    return settings, task, model, converter_of(layout, settings['padded_to'])


def from_smiles(smiles, settings, task):
    """Return (data set, rows with reasons) of molecules of the command line."""
    if settings['padded_to'] is None and settings['layout'] != 'packed':
        text = (
            'Note: a prediction may depend on the molecules given beside it, as in Chainer '
            'Chemistry; not if the model is trained with --padded-to largest'
        )
        print(text, file=sys.stderr)
    return data.preprocess(data.typed_smiles(smiles, len(task.names)), task, settings['method'])


def from_test_part(folder, settings, task, source):
    """Return (data set, rows) of the test molecules of the training in a folder."""
    path = settings['data']
    missing = 'skip' if settings['skip_missing'] else 'refuse'
    if os.path.isabs(path) and not os.path.exists(path):
        # The folder may have moved together with the data.
        near = os.path.abspath(os.path.join(folder, settings['data from here']))
        path = near if os.path.exists(near) else path
    description, rows = source.read(path, settings, missing=missing, others=True)
    dataset, rows = data.load(description, rows, task, settings['method'], settings['num_data'])
    if len(dataset) != settings['n_molecules'] or data.digest(rows) != settings['digest']:
        raise DataError(
            '%s has other molecules or labels, or in another order, than when the model was '
            'trained: the test part cannot be found again' % path
        )
    used = rows.take(rows.reason == '')
    test = data.split(used.smiles, settings)[2]
    print('%d molecules of the test part' % len(test))
    return dataset[test], used.take(test)


def predict(source):
    """Predict, print the errors where the truth is known, and write the CSV file.

    `source` is the script that has trained the model, as a module.
    """
    script = files.script_of(source)
    parser = arguments.make_parser('Prediction with a model of %s.' % script)
    arguments.add_trained_arguments(parser, script)
    molecules = parser.add_mutually_exclusive_group()
    molecules.add_argument(
        '--data',
        help='as of the training, or a CSV file with its column of SMILES; errors are reported '
        'for the targets that it contains; default: the test part',
    )
    molecules.add_argument('--smiles', nargs='+', help='molecules; writes a file only with --out')
    parser.add_argument('--out', '-o', help='CSV file to write (IN_DIR/predictions.csv)')
    parser.add_argument('--force', action='store_true', help='replace the file of --out')
    args = parser.parse_args()
    settings, task, model, converter = load(args, source)
    own_file = os.path.join(args.in_dir, 'predictions.csv')
    out = own_file if args.out is None and not args.smiles else args.out
    failed_file = None
    if out is not None:
        files.check_new_file(out, args.force)
        if args.smiles or args.data:
            beside = own_file if files.is_special(out) else out
            failed_file = os.path.splitext(beside)[0] + '_failed.csv'
            files.check_new_file(failed_file, args.force)

    if args.smiles:
        dataset, rows = from_smiles(args.smiles, settings, task)
    elif args.data:
        description, rows = source.read(args.data, settings, missing='keep', others=True)
        dataset, rows = data.load(description, rows, task, settings['method'])
    else:
        dataset, rows = from_test_part(args.in_dir, settings, task, source)
    others = rows.others.reset_index(drop=True).drop(columns='smiles', errors='ignore')
    has_truth = ~numpy.isnan(rows.labels).all(axis=0)
    titles = [task.column_titles(name)[: 1 + known] for name, known in zip(task.names, has_truth)]
    for title in sum(titles, []):
        if title in others:
            text = 'the data have a column %r, which the predictions would replace; rename it'
            raise DataError(text % title)
    files.report_failures(rows, failed_file)

    predictions = task.predict(model, dataset, converter, args.batchsize)
    # One row for each molecule of the input, empty where there is no prediction.
    every = numpy.full(rows.labels.shape, numpy.nan)
    is_used = rows.reason == ''
    every[is_used] = predictions
    result = pandas.DataFrame({'smiles': rows.smiles}).join(others)
    for i, of_label in enumerate(titles):
        for title, values in zip(of_label, (every, rows.labels)):
            result[title] = values[:, i]
    if args.smiles:
        print(result.to_string(index=False))
    for line in task.report(rows.labels[is_used], predictions)[0]:
        print(line)
    if out is not None:
        files.write_table(out, result)
        print('Predictions: %s' % out)
    return 0
