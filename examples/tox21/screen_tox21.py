#!/usr/bin/env python
"""Screen a list of molecules of any length with a model that train_tox21.py made.

    python screen_tox21.py molecules.smi --in-dir result --out scores.csv --device 0
    python screen_tox21.py --in-dir result <molecules.smi >scores.csv
    mpirun -n 4 python screen_tox21.py molecules.smi --in-dir result --out scores.csv \\
        --communicator pure_nccl

One SMILES a line; text after a blank is ignored. A file may be compressed by gzip. Rows are written
as they are ready, those with numbers in the order of the lines; for the others the column error
gives the reason. Under mpirun all rows are in the order of the lines.
"""

import contextlib
import csv
import gzip
import io
import itertools
import os
import sys
import typing
import warnings
import zlib

import tox21_data  # before common, which it finds
from chainer import functions
from chainer_bspmm.training import captured_predict
from common import arguments
from common import files
from common import prediction
from common import training
from common.data import DataError
from common.ranks import ranks_of


def read_from(path):
    """Return the file of lines that `path` names, plain or compressed, or standard input."""
    file: typing.Any = sys.stdin.buffer
    if path not in (None, '-'):
        try:
            file = open(path, 'rb')
        except OSError as error:
            raise DataError('cannot read %s: %s' % (path, error.strerror)) from error
        if file.peek(2)[:2] == b'\x1f\x8b':
            file = gzip.open(file)
    # Neither in SMILES: separators of a table, bytes of gzip and of UTF-16.
    first = file.peek(80).split(b'\n')[0]
    if set((first.split() or [b''])[0]) & set(b',;') or set(first) & set(b'\x1f\0'):
        raise DataError(
            '%s: expected one SMILES a line, got %r; for a CSV file use predict_tox21.py --data'
            % (path or 'standard input', first[:40].decode(errors='replace'))
        )
    # A character that is not UTF-8 affects its line, not the whole run.
    return io.TextIOWrapper(file, encoding='utf-8-sig', errors='replace')


@contextlib.contextmanager
def written_to(path):
    """Give a file for a CSV table, or standard output, and say what cannot be written.

    When the reader of the output, such as ``head``, has closed it, exit quietly with status 1.
    """
    with files.writing(path or 'standard output'), contextlib.ExitStack() as stack:
        file = sys.stdout
        if path is not None:
            file = stack.enter_context(open(path, 'w', encoding='utf-8', newline=''))
        try:
            yield file
            file.flush()
        except BrokenPipeError:
            # Python flushes once more on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
            sys.exit(1)


def rows(lines, model, method, converter, batch_size, n_processes):
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
        n_processes=n_processes,
    ):
        for failure in failures:
            yield failure.position, texts.pop(failure.position), failure.reason, []
        for position, probabilities in zip(index.tolist(), values.tolist()):
            yield position, texts.pop(position), '', probabilities


def in_turns(found, batch_size):
    """Yield lists of rows, sorted, each of `batch_size` lines; rows of failures may come late."""
    waiting, turn = {}, 0
    for row in found:
        waiting.setdefault(row[0] // batch_size, []).append(row)
        while len(waiting.get(turn, ())) == batch_size:
            yield sorted(waiting.pop(turn))
            turn += 1
    for turn in sorted(waiting):
        yield sorted(waiting[turn])


def from_all(ranks, found, batch_size):
    """Yield the rows that all ranks have found, in the order of the lines; they take turns."""
    turns = in_turns(found, batch_size)
    for round_ in itertools.count():
        of_ranks = ranks.comm.mpi_comm.allgather(next(turns, None))
        if not any(of_ranks):
            return
        for rank, turn in enumerate(of_ranks):
            first = (round_ * ranks.size + rank) * batch_size
            for position, *row in turn or ():
                yield (first + position % batch_size, *row)


def check_source(ranks, path):
    """Refuse what the processes cannot share out, because they do not read the same."""
    if path in (None, '-'):
        raise DataError('--communicator: expected a file of SMILES, which every process reads')
    checksum = None  # not to be read: told later
    with contextlib.suppress(OSError), open(path, 'rb') as file:
        checksum = 0
        while part := file.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
    if ranks.common([checksum]) != {checksum}:
        raise DataError('--communicator: %s is not the same for all processes' % path)


def run():
    """Screen, and write the CSV file."""
    parser = arguments.make_parser('Screening with a model trained on Tox21.')
    parser.add_argument(
        'smiles', nargs='?', help='file of SMILES; without it, or -: standard input'
    )
    arguments.add_trained_arguments(parser, 'train_tox21.py', batchsize=1024)
    parser.add_argument('--out', '-o', help='CSV file to write; without it: standard output')
    parser.add_argument('--force', action='store_true', help='replace the file of --out')
    arguments.add_communicator_argument(parser, 'share the lines out to')
    args = parser.parse_args()
    ranks = ranks_of(args.communicator)
    if args.out is not None and ranks.is_first:
        files.check_new_file(args.out, args.force)
    n_processes = None
    if ranks.are_several:
        check_source(ranks, args.smiles)
        n_processes = max(1, os.cpu_count() // ranks.comm.intra_size)  # the CPUs of a host
    device = arguments.get_device(ranks.device(args.device))
    settings, task, model, converter = prediction.load(args, 'train_tox21.py', tox21_data, device)
    # Failures are in the table, and counted below.
    warnings.filterwarnings('ignore', 'captured_predict: .* could not be used')
    n_rows = n_failures = 0
    with read_from(args.smiles) as lines:
        size, mine = args.batchsize, lines
        if ranks.are_several:
            mine = (line for i, line in enumerate(lines) if i // size % ranks.size == ranks.rank)
        found = rows(mine, model, settings['method'], converter, size, n_processes)
        if ranks.are_several:
            found = from_all(ranks, found, size)
        if not ranks.is_first:
            for _ in found:
                pass
            return 0
        with written_to(args.out) as file:
            writer = csv.writer(file, lineterminator='\n')
            titles = [task.column_titles(name)[0] for name in task.names]
            writer.writerow(['line', 'smiles', 'error', *titles])
            for position, smiles, error, probabilities in found:
                numbers = ['%.7g' % probability for probability in probabilities]
                writer.writerow([position + 1, smiles, error, *(numbers or [''] * len(titles))])
                n_rows += 1
                n_failures += bool(error)
    print('%d molecules, %d of them could not be used' % (n_rows, n_failures), file=sys.stderr)
    return 0


if __name__ == '__main__':
    training.main(run)
