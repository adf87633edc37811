#!/usr/bin/env python
"""Screen a list of molecules of any length with a model that train_tox21.py made.

    python screen_tox21.py molecules.smi --in-dir result --out scores.csv --device 0
    python screen_tox21.py --in-dir result <molecules.smi >scores.csv
    mpirun -n 4 python screen_tox21.py molecules.smi --in-dir result --out scores.csv \\
        --communicator pure_nccl

One SMILES a line; text after a blank is the name of the molecule. A file may be compressed by gzip.
Rows are written as they are ready. Rows with numbers are in the order of the lines; the other rows
have the reason in the column error. Under mpirun all rows are in the order of the lines.
"""

import contextlib
import csv
import gzip
import io
import itertools
import os
import sys
import warnings
import zlib

import train_tox21  # before common: puts its folder on sys.path
from chainer import functions
from chainer_bspmm.training import captured_predict
from common import arguments, data, prediction, training
from common.data import DataError
from common.ranks import ranks_of


@contextlib.contextmanager
def reading(path):
    """Turn an error of reading, such as a damaged archive, into a DataError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError('%s cannot be read: %s' % (path, error)) from error


def read_from(path):
    """Return the file of lines that `path` names, plain or compressed, or standard input."""
    with reading(path):
        file = data.opened(path)
        first = file.peek(80).split(b'\n')[0]
    # SMILES contain neither separators of a table nor bytes of gzip and UTF-16.
    if set((first.split() or [b''])[0]) & set(b',;') or set(first) & set(b'\x1f\0'):
        text = '%s: expected one SMILES a line, got %r; for a CSV file use predict_tox21.py --data'
        raise DataError(
            text % ('standard input' if path == '-' else path, first[:40].decode(errors='replace'))
        )
    # A character that is not UTF-8 affects its line, not the whole run.
    return io.TextIOWrapper(file, encoding='utf-8-sig', errors='replace')


def numbered(file, path):
    """Yield (number, text) of the lines of a file."""
    with reading(path):
        yield from enumerate(file, 1)


@contextlib.contextmanager
def written_to(path):
    """Give a file for a CSV table, or standard output; raise DataError if writing fails."""
    with data.writing('standard output' if path == '-' else path):
        if path == '-':
            yield data.standard_output()
            sys.stdout.flush()
            return
        if os.path.islink(path) and not data.is_special(path):
            os.remove(path)  # a link is replaced, not followed
        with data.create(path) as file:
            is_plain = not path.endswith('.gz')
            binary = file if is_plain else gzip.GzipFile(fileobj=file, mode='wb')
            with io.TextIOWrapper(binary, encoding='utf-8', newline='') as text:
                yield text


def rows(lines, model, **options):
    """Yield (number, SMILES, name, error, list of probabilities) of lines, given as (number, text).

    `options`: see `captured_predict`.
    """
    waiting = {}  # position -> (number, SMILES, name) of the lines in progress

    def smiles():
        for position, (number, line) in enumerate(lines):
            text, *name = line.split(maxsplit=1) or ['']
            waiting[position] = number, text, ''.join(name).rstrip()
            yield text

    for index, values, failures in captured_predict(
        model, smiles(), postprocess_fn=functions.sigmoid, **options
    ):
        for failure in failures:
            yield (*waiting.pop(failure.position), failure.reason, [])
        for position, probabilities in zip(index.tolist(), values.tolist()):
            yield (*waiting.pop(position), '', probabilities)


def from_all(ranks, found, n_rows):
    """Yield the rows that all ranks find, in the order of the lines; `n_rows` of each at a time."""
    found = iter(found)
    waiting = {}
    number = 1
    while any(of_ranks := ranks.comm.mpi_comm.allgather(list(itertools.islice(found, n_rows)))):
        waiting.update((row[0], row) for row in itertools.chain(*of_ranks))
        while number in waiting:  # rows of failures come late
            yield waiting.pop(number)
            number += 1


def check_source(ranks, path):
    """Refuse an input that processes cannot share out, because they do not all read the same."""
    if path == '-':
        raise DataError('--communicator: expected a file of SMILES, which every process reads')
    checksum = None  # the file cannot be read; the error comes later
    with contextlib.suppress(OSError), open(path, 'rb') as file:
        checksum = 0
        while part := file.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
    if ranks.common([checksum]) != {checksum}:
        raise DataError('--communicator: %s is not the same for all processes' % path)


def run():
    """Screen, and write the CSV file."""
    parser = arguments.make_parser('Screening with a model trained on Tox21.')
    parser.add_argument('smiles', nargs='?', default='-', help='file of SMILES; -: standard input')
    arguments.add_trained_arguments(
        parser, 'train_tox21.py', out='CSV file to write; -: standard output', batchsize=1024
    )
    parser.set_defaults(out='-')
    arguments.add_communicator_argument(parser, 'distribute the lines to')
    args = parser.parse_args()
    ranks = ranks_of(args.communicator)
    if ranks.is_first:
        args.out = data.output_of(args.out, args.force)
        if data.is_input(args.out, args.smiles):
            name = 'standard output' if args.out == '-' else args.out
            raise DataError('--out: %s is the list to screen; expected another file' % name)
    n_processes = None
    if ranks.are_several:
        check_source(ranks, args.smiles)
        n_processes = max(1, os.cpu_count() // ranks.comm.intra_size)  # the CPUs of a host
    args.device = ranks.device(args.device)
    settings, task, model, converter = prediction.load(args, train_tox21)
    # Failures are in the table, and counted below.
    warnings.filterwarnings('ignore', 'captured_predict: .* could not be used')
    size = args.batchsize
    n_rows = 0
    n_failures = 0
    with read_from(args.smiles) as lines:
        mine = (
            line
            for line in numbered(lines, args.smiles)
            if line[0] // size % ranks.size == ranks.rank
        )
        found = rows(
            mine,
            model,
            batch_size=size,
            method=settings['method'],
            converter=converter,
            n_processes=n_processes,
        )
        if ranks.are_several:
            found = from_all(ranks, found, size)
        with written_to(args.out if ranks.is_first else os.devnull) as file:
            writer = csv.writer(file, lineterminator='\n')
            titles = list(map(task.column_title, task.names))
            writer.writerow(['line', 'smiles', 'name', 'error', *titles])
            for number, smiles, name, error, probabilities in found:
                cells = [task.number % probability for probability in probabilities]
                writer.writerow([number, smiles, name, error, *(cells or [''] * len(titles))])
                n_rows += 1
                n_failures += bool(error)
    if ranks.is_first:
        print('molecules: %d, not usable: %d' % (n_rows, n_failures), file=sys.stderr)
        if n_rows and n_failures == n_rows:
            raise DataError(prediction.NONE_USED)
    return 0


if __name__ == '__main__':
    training.main(run)
