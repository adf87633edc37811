"""Predict with a model trained by a train_*.py: the body of every predict_*.py."""

import contextlib
import io
import os
import sys

import numpy
import pandas
from common import arguments, data, folder

NONE_USED = 'none of the molecules can be used, so nothing is predicted'


def load(args, source):
    """Load settings, task, model and converter of a training by `source` from `args.in_dir`."""
    device = arguments.use_device(args.device)
    settings, task, model, converter = folder.load_run(args.in_dir, source)
    name = folder.BEST_FILE if args.model == 'best' else folder.MODEL_FILE
    folder.load_npz(os.path.join(args.in_dir, name), model)
    model.to_device(device)
    return settings, task, model, converter


def from_smiles(smiles, settings, task):
    """Parse SMILES of the command line into (data set, rows with reasons)."""
    if settings['padded_to'] is None and settings['layout'] != 'packed':
        print(
            'Note: as in Chainer Chemistry, a prediction may depend on the other molecules of its '
            'batch; training with --padded-to largest avoids that',
            file=sys.stderr,
        )
    return data.preprocess(data.typed_smiles(smiles, task.names), settings['method'])


def report_known(rows, path):
    """Print the number of molecules that were in the training, which the file `path` lists."""
    if os.path.exists(path):  # earlier versions did not write it
        n_known = rows.used.canonical.isin(data.read_table(path)['smiles']).sum()
        if n_known:
            print(
                'molecules that were used in the training: %d of %d; how well these are predicted '
                'says nothing about new molecules' % (n_known, len(rows.used.canonical))
            )


def predict(source):
    """Predict, print the errors where the truth is known, and write the CSV file.

    `source` is the script that has trained the model, as a module.
    """
    script = os.path.basename(source.__file__)
    parser = arguments.make_parser('Prediction with a model of %s.' % script)
    arguments.add_trained_arguments(
        parser, script, out='CSV file to write, - for standard output (IN_DIR/predictions.csv)'
    )
    molecules = parser.add_mutually_exclusive_group()
    molecules.add_argument(
        '--data',
        help='as for the training, or a CSV file with its column of SMILES, - for standard input; '
        'errors are reported for the targets that the file contains; default: the test part',
    )
    molecules.add_argument('--smiles', nargs='+', help='molecules; writes a file only with --out')
    args = parser.parse_args()
    settings, task, model, converter = load(args, source)
    out = args.out
    if out is None and not args.smiles:
        out = os.path.join(args.in_dir, folder.PREDICTIONS_FILE)
    if out is not None:
        out = data.output_of(out, args.force)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if args.smiles:
            dataset, rows = from_smiles(args.smiles, settings, task)
        else:
            path = args.data
            if path is None:
                path = os.path.join(args.in_dir, folder.TEST_FILE)
            description, rows = source.read(path, settings, missing='keep')
            dataset, rows = data.load(description, rows, task, settings['method'])
        predictions = numpy.empty((0, len(task.names)))
        if len(dataset):
            predictions = task.predict(model, dataset, converter, args.batchsize)
        # The result has a row for each molecule of the input, empty without a prediction.
        titles = list(map(task.column_title, task.names))
        answers = pandas.DataFrame(predictions, rows.used.smiles.index, titles)
        result = rows.table.join(answers)
        if not rows.is_used.all():
            result[data.WHY] = rows.reason
        data.report_failures(rows)
        report_known(rows, os.path.join(args.in_dir, folder.KNOWN_FILE))
        if args.smiles and out != '-':
            print(result.to_string(index=False, na_rep='', float_format=task.number))
        for line in task.report(rows.used.labels.to_numpy(), predictions)[0]:
            print(line)
    if out is not None:
        data.write_table(out, result, task.number)
    # This is printed once the table is written: its reader may be `head`, which ends early.
    if out == '-':
        print(said.getvalue(), end='', file=sys.stderr)
    else:
        with data.writing('standard output'):
            print(said.getvalue(), end='')
            if out is not None:
                print('Predictions: %s' % out)
    if not len(dataset):
        raise data.DataError(NONE_USED)
    return 0
