"""Read and write CSV files, turn SMILES into graphs, split data sets."""

import contextlib
import csv
import gzip
import hashlib
import io
import itertools
import os
import stat
import sys
import tempfile
import textwrap
import typing
import warnings
import zlib

import numpy
import pandas
from chainer_bspmm.dataset import SparseDataset, from_smiles
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.dataset.splitters.scaffold_splitter import ScaffoldSplitter
from chainer_chemistry.datasets import NumpyTupleDataset
from rdkit import Chem, rdBase
from tqdm import tqdm

WHY = 'not predicted'  # the column of reasons
MISSING = ('', 'na', 'n/a', '#n/a', 'nan', 'none', 'null')  # cells without a label, in any case
DESCRIPTORS = ('/dev/fd', '/proc/self/fd')  # folders of the files that this process has open


class DataError(ValueError):
    """Data or options that cannot be used; the message is meant for the user."""


class Rows(typing.NamedTuple):
    """Molecules of a file or of the command line; the index of each part says 'FILE row N'."""

    table: pandas.DataFrame  # the cells as they were read, in the columns of the file
    smiles: pandas.Series
    labels: pandas.DataFrame  # float64, a column for each target, NaN where one is missing
    reason: pandas.Series  # why a molecule cannot be used, '' if it can
    canonical: pandas.Series  # SMILES without stereo, which the models do not see; '' if not used

    def take(self, index):
        """Return the rows at some positions, or of a mask."""
        return Rows(*(part.iloc[index] for part in self))

    @property
    def is_used(self):
        """Mask of the molecules that can be used."""
        return (self.reason == '').to_numpy(bool)

    @property
    def used(self):
        """Rows of the molecules that can be used."""
        return self.take(self.is_used)


def rows_of(table, smiles_column, names):
    """Return the rows of a table; SMILES, and labels with these names, are not parsed yet."""
    smiles = table[smiles_column]
    nothing = pandas.Series('', table.index, dtype=object, name='smiles')
    return Rows(
        table,
        smiles,
        labels=pandas.DataFrame(numpy.nan, table.index, names),
        reason=nothing.mask(smiles.str.strip() == '', 'no SMILES'),
        canonical=nothing,
    )


def typed_smiles(smiles, names):
    """Return the rows of SMILES on the command line; labels, with these names, are unknown."""
    where = ['--smiles %d' % i for i in range(1, len(smiles) + 1)]
    return rows_of(pandas.DataFrame({'smiles': smiles}, where, dtype=object), 'smiles', names)


def name_of(path):
    """Return the name of an input in messages; the path ``'-'`` is standard input."""
    return 'standard input' if path == '-' else path


def opened(path):
    """Open a file to read its bytes, which gzip may have compressed; ``'-'`` is standard input."""
    try:
        file: typing.Any = sys.stdin.buffer if path == '-' else open(path, 'rb')
    except OSError as error:
        name = os.path.abspath(path) if path else "''"
        raise DataError('cannot read %s: %s' % (name, error.strerror)) from error
    return gzip.open(file) if file.peek(2)[:2] == b'\x1f\x8b' else file


def in_utf_8(line):
    """Return a line decoded with surrogateescape if it is UTF-8, else raise UnicodeDecodeError."""
    return line.encode('utf-8', 'surrogateescape').decode('utf-8')


def is_input(path, source):
    """Return whether an output is the regular file that is read.

    ``'-'`` is standard output, or standard input as `source`. A link to an output is replaced, not
    followed, unless it leads to a file that this process has open.
    """
    number = 1 if path == '-' else descriptor_of(path)
    try:
        read = os.fstat(0) if source == '-' else os.stat(source)
        written = os.lstat(path) if number is None else os.fstat(number)
    except OSError:  # one of them is no file
        return False
    return stat.S_ISREG(read.st_mode) and os.path.samestat(read, written)


def read_table(path):
    """Read a CSV file as a table of text, without blank lines; its index is 'FILE row N'.

    N counts all rows from 1, the header and blank ones included. The header is the first row with
    text. The file is read once, so it may be a pipe. No row or cell gets lost: below the header a
    row of commas is a row, cells beyond the header must be empty, and quotes must be closed.
    """
    name = name_of(path)
    row = os.path.basename(name) + ' row %d'
    records = {}
    number = 0
    try:
        # The decoder reads far ahead. So each row is decoded once more, and an error belongs to the
        # row after the last one that was read.
        with io.TextIOWrapper(opened(path), 'utf-8-sig', 'surrogateescape', newline='') as file:
            for number, cells in enumerate(csv.reader(map(in_utf_8, file), strict=True), 1):
                is_blank = not cells or ','.join(cells).isspace()
                if ''.join(cells).strip() or records and not is_blank:
                    records[row % number] = cells
    except csv.Error as error:
        raise DataError('%s cannot be read as CSV: %s' % (row % (number + 1), error)) from error
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            '%s cannot be read as CSV: %s; expected text in UTF-8, plain or compressed by gzip'
            % (row % (number + 1), error)
        ) from error
    if not records:
        raise DataError('%s is empty' % name)
    first, *where = records
    header, *lines = records.values()
    if not lines:
        raise DataError(
            '%s has no molecules: its only row, the header, is %.60r' % (name, ','.join(header))
        )
    n = len(header)
    long = [i for i, cells in enumerate(lines) if ''.join(cells[n:]).strip()]
    if long:
        raise DataError(
            '%s has %d cells (rows like this: %d): %.60r; expected %d, as %s, which was taken as '
            'the header: %.60r; a cell with a comma needs quotes'
            % (
                where[long[0]],
                len(lines[long[0]]),
                len(long),
                ','.join(lines[long[0]]),
                n,
                first,
                ','.join(header),
            )
        )
    lines = [cells[:n] + [''] * (n - len(cells)) for cells in lines]
    return pandas.DataFrame(lines, where, header, dtype=object)


def read_csv(path, smiles_column, task, columns=None, missing='refuse'):
    """Read the rows of a CSV file, plain or compressed.

    `columns`: names of the columns of labels, by default the task's. `missing`: treatment of a
    molecule without a label that the task needs. 'refuse' the file, 'skip' the molecule, or 'keep'
    it, even if the file lacks the column.
    """
    columns = columns or task.names
    table = read_table(path)
    path = name_of(path)
    header = list(table)
    for name in (smiles_column, *columns):
        if header.count(name) > 1:
            raise DataError('%s has %d columns %r' % (path, header.count(name), name))
        if name not in header and (missing != 'keep' or name == smiles_column):
            wanted = ', '.join(map(repr, (smiles_column, *columns)))
            found = textwrap.shorten(', '.join(map(repr, header)), 500)
            raise DataError(
                '%s has no column %r; expected the columns %s, separated by commas, found %s'
                % (path, name, wanted, found)
            )
    for name in (*map(task.column_title, task.names), WHY):
        if name in header:
            raise DataError(
                '%s has a column %r, which the predictions would replace; rename it' % (path, name)
            )
    rows = rows_of(table, smiles_column, task.names)
    for target, column in zip(task.names, columns):
        if column in table:
            rows.labels[target] = _labels_of(table[column][rows.is_used], task, missing)
    if missing == 'skip':
        is_known = rows.labels.notna()
        # A classification of several targets learns from the labels that are not missing.
        kept = is_known.any(axis=1) if task.may_be_missing else is_known.all(axis=1)
        rows.reason[~kept & rows.is_used] = 'no label'
    return rows


def _labels_of(cells, task, missing):
    """Return the labels of a column, float64, NaN for a missing one."""
    text = cells.str.strip()
    values = pandas.to_numeric(text, errors='coerce').astype(numpy.float64)
    values = values.where(task.is_good(values))
    is_empty = text.str.lower().isin(MISSING)
    may_be_empty = task.may_be_missing or missing != 'refuse'
    bad = text[values.isna() & ~(is_empty & may_be_empty)]
    if len(bad):
        advice = '; --skip-missing leaves empty ones out' if is_empty[bad.index].any() else ''
        message = '%s: target %s is %.60r, expected %s (rows like this: %d%s)' % (
            bad.index[0],
            cells.name,
            bad.iloc[0],
            task.expected,
            len(bad),
            advice,
        )
        if missing != 'keep':
            raise DataError(message)
        print('Unknown labels: ' + message)
    return values


@contextlib.contextmanager
def writing(path):
    """Turn an error of writing, such as a full disk or another user's folder, into a DataError."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of stdout has ended: training.main ends quietly
    except OSError as error:
        sys.unraisablehook = lambda _: None  # a half-written archive complains when it is freed
        raise DataError('cannot write %s: %s' % (path, error.strerror or error)) from error


def descriptor_of(path):
    """Return N if a path is /dev/fd/N or a link to it, such as /dev/stdout, else None."""
    while os.path.exists(path):  # a loop of links does not exist
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)
        if name.isdigit() and folder in map(os.path.realpath, DESCRIPTORS):
            return int(name)
        if not os.path.islink(path):
            break
        path = os.path.join(folder, os.readlink(path))
    return None


def is_special(path):
    """Return whether a path is written to as it is, and never removed or replaced.

    Such a path leads to a pipe, a device or anything else but a regular file, or to a file that
    this process has open, such as its standard output.
    """
    is_regular = os.path.isfile(path) or not os.path.exists(path)
    return descriptor_of(path) is not None or not is_regular


@contextlib.contextmanager
def replacing(path):
    """Context with a path for a new file, which replaces the file at `path` once it is complete.

    A link is replaced, not followed, unless it `is_special`.
    """
    folder, name = os.path.split(path)
    with writing(path):
        if is_special(path):
            yield path
            return
        with tempfile.TemporaryDirectory(prefix='.new_', dir=folder or '.') as new:
            yield os.path.join(new, name)
            os.replace(os.path.join(new, name), path)


def create(path):
    """Open a file to write bytes.

    A file that this process already has open is continued, because opening it by its path would
    truncate it.
    """
    number = descriptor_of(path)
    return open(path, 'wb') if number is None else open(number, 'wb', closefd=False)


def standard_output():
    """Return standard output for a table: in UTF-8, as files are, whatever the locale."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding='utf-8', errors='surrogateescape', newline='')
    return sys.stdout


def csv_of(table, number=None):
    """Return a table as the text of a CSV file; `number` is the format of numbers."""
    cells = itertools.chain(table, *(column for _, column in table.items()))
    # Python quotes a carriage return, which ends a row, only from version 3.13 on.
    has_return = any(isinstance(cell, str) and '\r' in cell for cell in cells)
    quoting = csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL
    file = io.StringIO(newline='')
    table.to_csv(file, index=False, float_format=number, quoting=quoting)
    return file.getvalue()


def write_table(path, table, number=None):
    """Write a CSV file, compressed if it ends in .gz, as a whole or not at all.

    `number` is the format of numbers. The path ``'-'`` is standard output.
    """
    text = csv_of(table, number)
    if path == '-':
        with writing('standard output'):
            standard_output().write(text)
            sys.stdout.flush()
        return
    content = text.encode(errors='surrogateescape')  # bytes of a command line may be no UTF-8
    with replacing(path) as new, create(new) as file:
        file.write(gzip.compress(content) if path.endswith('.gz') else content)


def output_of(path, force):
    """Return the path of an output file, which is ``'-'`` for any path of standard output.

    Refuses a file that exists, unless `force`, and a path whose folder does not exist.
    """
    if path == '-' or descriptor_of(path) == 1:
        return '-'
    if not path:
        raise DataError('--out: expected a file, got an empty name')
    if not os.path.isdir(os.path.dirname(path) or '.') or os.path.isdir(path):
        raise DataError(
            '--out: cannot write %s: it is a folder, or its folder does not exist' % path
        )
    if os.path.lexists(path) and not is_special(path) and not force:
        found = 'exists' if os.path.exists(path) else 'is a link to a file that does not exist'
        raise DataError(
            '--out: %s %s; expected a new file, or --force to replace it' % (path, found)
        )
    return path


def report_failures(rows, path=None, shown=10):
    """Print the number of unusable molecules and the first reasons; write all to a file."""
    columns = {'row': rows.smiles.index, 'smiles': rows.smiles, 'reason': rows.reason}
    bad = pandas.DataFrame(columns)[~rows.is_used]
    if bad.empty:
        return
    listed = '' if path is None else ', all listed in %s' % path
    print('%d molecule(s) could not be used%s' % (len(bad), listed))
    for cells in bad[:shown].itertuples(index=False):
        print('  %s: %.60r: %s' % cells)
    if len(bad) > shown > 0:
        print('  ... and %d more' % (len(bad) - shown))
    if path is not None:
        write_table(path, bad)


def report_duplicates(rows):
    """Print the number of molecules that equal an earlier one, except for stereo.

    Models do not see stereo, so for them these molecules are the same.
    """
    again = rows.take(rows.canonical.duplicated().to_numpy())
    if len(again.smiles):
        print(
            'Duplicates: %d molecule(s) equal an earlier one except for stereo, the first: %s: %r; '
            'training and test may share molecules'
            % (len(again.smiles), again.smiles.index[0], again.smiles.iloc[0])
        )


def spread(n, num_data):
    """Return `num_data` indices spread evenly over range(n); -1 means all of them."""
    # Data are often sorted by size: the first molecules would only be the smallest ones.
    num_data = n if num_data < 0 else min(num_data, n)
    return numpy.arange(num_data) * n // num_data


def digest(rows):
    """Return a short text that changes with the SMILES, the labels or their order."""
    text = '\n'.join(rows.smiles).encode()
    return hashlib.sha256(text + rows.labels.to_numpy().tobytes()).hexdigest()[:16]


def dense_dataset(smiles, method):
    """Turn SMILES that can be used into upstream's dense data set, without labels."""
    preprocessor = preprocess_method_dict[method]()
    examples = []
    # disable=None: a progress bar on a terminal, none in a file or pipe.
    with rdBase.BlockLogs():
        for text in tqdm(smiles, desc='preprocessing', leave=False, disable=None):
            # Upstream's parsers take the molecule of the canonical SMILES.
            _, mol = preprocessor.prepare_smiles_and_mol(Chem.MolFromSmiles(text))
            examples.append(preprocessor.get_input_features(mol))
    # Not numpy.array: it would stack molecules that happen to have one size.
    columns = [pandas.Series(list(values), dtype=object).to_numpy() for values in zip(*examples)]
    return NumpyTupleDataset(*columns)


def labelled(dataset, labels):
    """Return a data set with labels beside its molecules."""
    if not isinstance(dataset, SparseDataset):
        return [(*example, label) for example, label in zip(dataset, labels)]
    molecules = dataset.molecules.take(dataset.order)
    molecules.labels.append(labels)
    return SparseDataset(molecules)


def preprocess(rows, method, dense=False):
    """Parse rows into (data set of the usable ones, without labels; rows with reasons).

    The data set is sparse, or with `dense` upstream's dense one, of the same molecules. If none is
    usable, it is sparse and empty.
    """
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # unusable molecules are listed
        # from_smiles refuses data without any molecule, so one is appended, and left out below.
        found = from_smiles([*rows.smiles, 'C'], method, cache=True)
    kept = found.kept[:-1]
    reasons = {failure.position: failure.reason for failure in found.failures}
    molecules = found.dataset.molecules
    owners = numpy.repeat(found.kept, molecules.sizes)
    # The largest atomic number of each molecule, NaN for a molecule without atoms.
    largest = pandas.Series(molecules.atoms).groupby(owners).max().reindex(kept)
    for position, number in largest[~(largest < MAX_ATOMIC_NUM)].items():
        text = 'atomic number %.0f, the models support those below %d' % (number, MAX_ATOMIC_NUM)
        reasons[position] = 'no atoms' if numpy.isnan(number) else text
    canonical = numpy.full(len(rows.smiles), '', object)
    canonical[kept] = found.smiles[:-1]
    reasons = [known or reasons.get(i, '') for i, known in enumerate(rows.reason)]
    rows = rows._replace(
        reason=pandas.Series(reasons, rows.smiles.index),
        canonical=pandas.Series(canonical, rows.smiles.index, name='smiles'),
    )
    sparse = found.dataset[:-1][rows.is_used[kept]]
    return (dense_dataset(rows.used.smiles, method) if dense and len(sparse) else sparse), rows


def load(description, rows, task, method, num_data=-1, dense=False):
    """Parse `num_data` molecules and print a summary; return (data set, rows with reasons)."""
    if num_data == 0:
        raise DataError('--num-data 0: expected at least one molecule, or -1 for all')
    n_rows = len(rows.smiles)
    rows = rows.take(spread(n_rows, num_data))
    # Parsing may take a minute. This goes to stderr, because a reader of stdout may end early.
    print('Parsing %d molecules' % len(rows.smiles), file=sys.stderr)
    dataset, rows = preprocess(rows, method, dense)
    used = '' if len(dataset) == n_rows else ', %d of them used' % len(dataset)
    print('Data: %s: %d molecules%s' % (description, n_rows, used))
    print('%s: %s' % ('Target' if len(task.names) == 1 else 'Targets', ', '.join(task.titles())))
    return dataset, rows


def split(examples, settings):
    """Return the indices of training, validation and test part; the latter two halve the rest.

    For a split by scaffold `examples` are SMILES. Chainer Chemistry's splitter puts molecules with
    the same scaffold into one part.
    """
    n = len(examples)
    ratio = settings['train_data_ratio']
    seed = settings['seed']
    if settings['split'] == 'random':
        order = numpy.random.RandomState(seed).permutation(n)
        n_train = int(n * ratio)
        parts = numpy.split(order, [n_train, n_train + (n - n_train) // 2])
    else:
        rest = (1 - ratio) / 2
        parts = ScaffoldSplitter().train_valid_test_split(
            numpy.arange(n), list(examples), ratio, rest, rest, seed=seed
        )
    if not all(map(len, parts)):
        raise DataError(
            'a %s split of %d with --train-data-ratio %g has an empty part; expected at least one '
            'each for training, validation and test' % (settings['split'], n, ratio)
        )
    return [numpy.asarray(part, int) for part in parts]
