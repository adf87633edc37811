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
import functools
import gzip
import io
import itertools
import os
import sys
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
from common.ranks import Ranks

# A character that is not UTF-8 affects its line, not the whole run.
as_text = functools.partial(io.TextIOWrapper, encoding='utf-8-sig', errors='replace')


@contextlib.contextmanager
def read_from(path):
    """Give the lines of a file, plain or compressed, or of standard input."""
    if path in (None, '-'):
        file = sys.stdin.buffer
    else:
        try:
            with open(path, 'rb') as raw:
                is_compressed = raw.read(2) == b'\x1f\x8b'
            file = gzip.open(path) if is_compressed else open(path, 'rb')
        except OSError as error:
            raise DataError('cannot read %s: %s' % (path, error.strerror)) from error
    with as_text(file) as lines:
        first = list(itertools.islice(lines, 1))
        text = ''.join(first)
        # Neither in SMILES: separators of a table, bytes of gzip and of UTF-16.
        if set((text.split() or [''])[0]) & set(',;') or set(text) & set('\x1f\0'):
            raise DataError(
                '%s: expected one SMILES a line, got %r; for a CSV file use predict_tox21.py '
                '--data' % (path or 'standard input', text[:40].rstrip())
            )
        yield itertools.chain(first, lines)


def write_to(path):
    """Return a context with a file for a CSV table, or with standard output."""
    if path is None:
        return contextlib.nullcontext(sys.stdout)
    return open(path, 'w', encoding='utf-8', newline='')


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


def rows(lines, model, method, converter, batch_size, n_processes=None):
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


def shared_rows(ranks, lines, batch_size, rows_of):
    """Yield the rows of all lines in their order, on the first rank; none on the others.

    The ranks take turns: each predicts every so many batches of lines, and sends the rows of a
    batch when the first rank takes them.

    Args:
        ranks (Ranks): several.
        lines (iterable of str): the same on all ranks.
        batch_size (int): lines of a turn.
        rows_of (callable): the lines of a rank -> their rows, as of :func:`rows`.
    """
    size, rank = ranks.comm.size, ranks.comm.rank
    mine = (line for i, line in enumerate(lines) if i // batch_size % size == rank)
    turns = itertools.chain(in_turns(rows_of(mine), batch_size), [None])
    if not ranks.is_first:
        for turn in turns:
            ranks.comm.send_obj(turn, dest=0)
        return
    unfinished = list(range(size))
    for round_ in itertools.count():
        for other in list(unfinished):
            turn = ranks.comm.recv_obj(source=other) if other else next(turns)
            if turn is None:
                unfinished.remove(other)
            for position, *row in turn or ():
                first = (round_ * size + other) * batch_size
                yield (first + position % batch_size, *row)
        if not unfinished:
            return


def check_source(ranks, path):
    """Refuse what the processes cannot share out, because they do not read the same."""
    if path in (None, '-'):
        raise DataError('--communicator: expected a file of SMILES, which every process reads')
    checksum = None  # not to be read: told later
    with contextlib.suppress(OSError), open(path, 'rb') as file:
        checksum = 0
        while part := file.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
    if len(set(ranks.comm.mpi_comm.allgather(checksum))) > 1:
        raise DataError('--communicator: %s is not the same for all processes' % path)


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


def processes_for(ranks):
    """Return how many processes parse SMILES for this rank, if the ranks of a host share it."""
    if not ranks.are_several:
        return None
    return max(1, os.cpu_count() // ranks.comm.intra_size)


def run():
    """Screen, and write the CSV file."""
    parser = arguments.make_parser('Screening with a model trained on Tox21.')
    parser.add_argument(
        'smiles', nargs='?', help='file of SMILES; without it, or -: standard input'
    )
    arguments.add_trained_arguments(parser, 'train_tox21.py')
    parser.add_argument('--out', '-o', help='CSV file to write; without it: standard output')
    arguments.add_force_argument(parser, 'replace the file of --out')
    arguments.add_running_arguments(parser, batchsize=1024)
    arguments.add_communicator_argument(parser, 'share the lines out to')
    args = parser.parse_args()
    ranks = Ranks(args.communicator)
    if args.out is not None and ranks.is_first:
        files.check_new_file(args.out, args.force)
    if ranks.are_several:
        check_source(ranks, args.smiles)
    device = arguments.get_device(ranks.device(args.device))
    settings, task, model = prediction.load(
        args, 'train_tox21.py', lambda settings: tox21_data.TASK, device
    )
    converter = prediction.converter_for(settings, args.layout)
    # Failures are in the table, and counted below.
    warnings.filterwarnings('ignore', 'captured_predict: .* could not be used')
    rows_of = functools.partial(
        rows,
        model=model,
        method=settings['method'],
        converter=converter,
        batch_size=args.batchsize,
        n_processes=processes_for(ranks),
    )
    n_rows = n_failures = 0
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(read_from(args.smiles))
        found = rows_of(lines)
        if ranks.are_several:
            found = shared_rows(ranks, lines, args.batchsize, rows_of)
        if not ranks.is_first:
            return sum(1 for _ in found)  # none
        stack.enter_context(files.writing(args.out or 'standard output'))
        file = stack.enter_context(write_to(args.out))
        stack.enter_context(until_pipe_closes(file))
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(
            ['line', 'smiles', 'error', *(task.column_titles(name)[0] for name in task.names)]
        )
        for position, smiles, error, probabilities in found:
            numbers = ['%.7g' % probability for probability in probabilities]
            writer.writerow([position + 1, smiles, error, *(numbers or [''] * len(task.names))])
            n_rows += 1
            n_failures += bool(error)
    print('%d molecules, %d of them could not be used' % (n_rows, n_failures), file=sys.stderr)
    return 0


if __name__ == '__main__':
    training.main(run)
