#!/usr/bin/env python
"""Predict with a model that train_qm9.py made.

    python predict_qm9.py --in-dir result                      # the test part of its data
    python predict_qm9.py --in-dir result --data molecules.csv # a file with a column smiles
    python predict_qm9.py --in-dir result --smiles CCO c1ccccc1
"""
import argparse
import os
import sys

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import numpy
import pandas
import qm9_data
import qm9_model


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description='Prediction with a model trained on QM9.',
                                     allow_abbrev=False)
    parser.add_argument('--in-dir', '-i', default='result', help='output folder of train_qm9.py')
    source = parser.add_mutually_exclusive_group()
    source.add_argument('--data', help='sample, full, or a CSV file with a column smiles; errors '
                                       'are reported for the targets that it has, too')
    source.add_argument('--smiles', nargs='+', help='molecules')
    parser.add_argument('--out', '-o', help='CSV file to write (IN_DIR/predictions.csv)')
    parser.add_argument('--batchsize', '-b', type=qm9_model.at_least(int, 1), default=32,
                        help='batch size')
    parser.add_argument('--device', '-d', default='-1',
                        help='-1: CPU; 0, 1, ...: that GPU; or a Chainer device specifier')
    parser.add_argument('--dense', action='store_true',
                        help="use upstream's dense model, with the same parameters")
    return parser.parse_args(argv)


def molecules(args, settings, out_dir):
    """Return what to predict: (data set, table, the rows of the table that the data set holds)."""
    label, method = settings['label'], settings['method']
    if args.smiles:
        names = qm9_data.target_names(label)
        table = pandas.DataFrame({
            'where': ['--smiles %d' % i for i in range(1, len(args.smiles) + 1)],
            'smiles': args.smiles}).assign(**{name: numpy.nan for name in names})
        dataset, kept, failures = qm9_data.preprocess(table, method, names)
        qm9_data.report_failures(failures, out_dir)
        return dataset, table, kept
    if args.data:
        return qm9_data.load_qm9(args.data, label, method, -1, out_dir, need_targets=False)
    dataset, table, kept = qm9_data.load_qm9(settings['data'], label, method,
                                             settings['num_data'], out_dir)
    if len(dataset) != settings['n_molecules']:
        raise qm9_data.DataError('%s had %d molecules when the model was trained and has %d now: '
                                 'the test part cannot be found again' % (
                                     settings['data'], settings['n_molecules'], len(dataset)))
    test = qm9_data.split_indices(len(dataset), settings['train_data_ratio'], settings['seed'])[2]
    print('%d molecules of the test part' % len(test))
    rows = [kept[i] for i in test]
    return ([dataset[int(i)] for i in test], table.iloc[rows].reset_index(drop=True),
            list(range(len(rows))))


def error_report(names, truth, predictions):
    """Return one line for each target of which the truth is known."""
    lines = []
    for j, name in enumerate(names):
        known = numpy.isfinite(truth[:, j])
        if known.any():
            error = numpy.abs(predictions[known, j] - truth[known, j]).mean()
            lines.append('MAE of %s: %.6g %s (%d molecules)' % (
                name, error, qm9_data.unit(name), known.sum()))
    return lines


def run(args):
    """Predict, and write the CSV file."""
    device = qm9_model.get_device(args.device)
    device.use()
    regressor, settings = qm9_model.load_model(args.in_dir, args.dense, device)
    out = args.out or os.path.join(args.in_dir, 'predictions.csv')
    out_dir = os.path.dirname(out) or '.'
    if not os.path.isdir(out_dir):
        raise qm9_data.DataError('--out: no such folder: %s' % out_dir)
    dataset, table, kept = molecules(args, settings, out_dir)

    predictions = qm9_model.predict(regressor, dataset, args.dense, args.batchsize)
    names = qm9_data.target_names(settings['label'])
    result = pandas.DataFrame({'smiles': table['smiles']})
    for j, name in enumerate(names):
        # One row for each molecule of the input, empty where there is no prediction.
        column = pandas.Series(predictions[:, j].astype(numpy.float64), index=kept)
        result['%s predicted [%s]' % (name, qm9_data.unit(name))] = column.reindex(table.index)
        if table[name].notna().any():
            result['%s true [%s]' % (name, qm9_data.unit(name))] = table[name]
    result.to_csv(out, index=False, float_format='%.7g')
    if args.smiles:
        print(result.to_string(index=False))
    for line in error_report(names, table[names].to_numpy()[kept], predictions):
        print(line)
    print('Predictions: %s' % out)


def main():
    try:
        run(parse_arguments())
    except qm9_data.DataError as error:
        sys.exit('error: %s' % error)


if __name__ == '__main__':
    main()
