#!/usr/bin/env python
"""Screen a list of molecules of any length with a model that train_tox21.py made.

    python screen_tox21.py molecules.smi --in-dir result --out scores.csv --device 0
    python screen_tox21.py --in-dir result <molecules.smi >scores.csv

One SMILES a line; text after a blank is ignored. A file may be compressed by gzip. Rows are written
as they are ready, those with numbers in the order of the lines; for the others the column error
gives the reason.
"""

import argparse
import contextlib
import csv
import gzip
import itertools
import os
import sys
import warnings

import tox21_data  # before common, which it finds
from chainer import functions
from chainer_bspmm.training import captured_predict
from common import arguments
from common import prediction
from common import training
from common.data import DataError

# A character that is not UTF-8 affects its line, not the whole run.
READING = {'encoding': 'utf-8-sig', 'errors': 'replace'}


@contextlib.contextmanager
def read_from(path):
    """Give the lines of a file, plain or compressed, or of standard input."""
    if path is None:
        sys.stdin.reconfigure(**READING)
        file = contextlib.nullcontext(sys.stdin)
    else:
        try:
            with open(path, 'rb') as raw:
                is_compressed = raw.read(2) == b'\x1f\x8b'
            file = gzip.open(path, 'rt', **READING) if is_compressed else open(path, **READING)
        except OSError as error:
            raise DataError('cannot read %s: %s' % (path, error.strerror)) from error
    with file as lines:
        first = list(itertools.islice(lines, 1))
        text = ''.join(first)
        if ',' in (text.split() or [''])[0] or '\x1f' in text:
            raise DataError(
                '%s: expected one SMILES a line, got %r; for a CSV file use predict_tox21.py '
                '--data' % (path or 'standard input', text[:40].rstrip())
            )
        yield itertools.chain(first, lines)


def write_to(path, source):
    """Return a context with a file for a CSV table, or with standard output."""
    if path is None:
        return contextlib.nullcontext(sys.stdout)
    if source is not None and os.path.exists(path) and os.path.samefile(path, source):
        raise DataError('--out: %s is the file to read' % path)
    try:
        return open(path, 'w', encoding='utf-8', newline='')
    except OSError as error:
        raise DataError('--out: cannot write %s: %s' % (path, error.strerror)) from error


@contextlib.contextmanager
def until_pipe_closes(file):
    """Exit quietly with status 1 when the reader of the output, such as ``head``, has closed it."""
    try:
        yield
        file.flush()
    except BrokenPipeError:
        # Python flushes once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        sys.exit(1)


def rows(lines, model, method, converter, batch_size):
    """Yield (position of the line, SMILES, error, list of probabilities)."""
    texts = {}  # SMILES of the lines in progress

    def smiles():
        for position, line in enumerate(lines):
            texts[position] = (line.split() or [''])[0]
            yield texts[position]

    for index, values, failures in captured_predict(
        model,
        smiles(),
        batch_size=batch_size,
        method=method,
        postprocess_fn=functions.sigmoid,
        converter=converter,
    ):
        for failure in failures:
            yield failure.position, texts.pop(failure.position), failure.reason, []
        for position, probabilities in zip(index.tolist(), values.tolist()):
            yield position, texts.pop(position), '', probabilities


def run():
    """Screen, and write the CSV file."""
    parser = argparse.ArgumentParser(
        description='Screening with a model trained on Tox21.', allow_abbrev=False
    )
    parser.add_argument('smiles', nargs='?', help='file of SMILES; without it: standard input')
    parser.add_argument('--in-dir', '-i', default='result', help='output folder of train_tox21.py')
    parser.add_argument('--out', '-o', help='CSV file to write; without it: standard output')
    arguments.add_layout_argument(parser)
    arguments.add_running_arguments(parser, batchsize=1024)
    args = parser.parse_args()
    settings, task, model = prediction.load(
        args.in_dir,
        'train_tox21.py',
        lambda settings: tox21_data.TASK,
        False,
        arguments.get_device(args.device),
    )
    converter = prediction.converter_for(settings, args.layout)
    # Failures are in the table, and counted below.
    warnings.filterwarnings('ignore', 'captured_predict: .* could not be used')
    n_rows = n_failures = 0
    with (
        read_from(args.smiles) as lines,
        write_to(args.out, args.smiles) as file,
        until_pipe_closes(file),
    ):
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(
            ['line', 'smiles', 'error', *(task.column_titles(name)[0] for name in task.names)]
        )
        for position, smiles, error, probabilities in rows(
            lines, model, settings['method'], converter, args.batchsize
        ):
            numbers = ['%.7g' % probability for probability in probabilities]
            writer.writerow([position + 1, smiles, error, *(numbers or [''] * len(task.names))])
            n_rows += 1
            n_failures += bool(error)
    print('%d molecules, %d of them could not be used' % (n_rows, n_failures), file=sys.stderr)
    return 0


if __name__ == '__main__':
    training.main(run)
