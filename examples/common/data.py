"""Read CSV files, turn SMILES into graphs, split data sets."""

import hashlib
import os
import typing
import zlib

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import numpy
import pandas
from chainer_bspmm.dataset import from_smiles
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.dataset.preprocessors.common import MolFeatureExtractionError
from chainer_chemistry.dataset.splitters.scaffold_splitter import ScaffoldSplitter
from chainer_chemistry.datasets import NumpyTupleDataset
from rdkit import Chem
from rdkit import rdBase
from tqdm import tqdm

NAMED = ('sample', 'full', 'download')  # values of --data that are not files
MISSING = ('', 'na', 'n/a', 'nan', 'none', 'null')  # cells without a label, in any case
READ = {'dtype': object, 'keep_default_na': False, 'encoding_errors': 'surrogateescape'}


class DataError(ValueError):
    """Data or options that cannot be used; the message is meant for the user."""


class Rows(typing.NamedTuple):
    """Molecules of a file or of the command line, before they are parsed."""

    where: numpy.ndarray  # (M,) of str: 'FILE row N', the header being row 1
    smiles: numpy.ndarray  # (M,) of str
    labels: numpy.ndarray  # (M, T) float64, NaN where one is missing
    others: pandas.DataFrame  # the other columns, as text

    def take(self, index):
        """Return some of the rows."""
        where, smiles, labels, others = self
        return Rows(where[index], smiles[index], labels[index], others.iloc[index])


def join(parts):
    """Return the rows of several files."""
    where, smiles, labels, others = zip(*parts)
    arrays = map(numpy.concatenate, (where, smiles, labels))
    return Rows(*arrays, others=pandas.concat(others, ignore_index=True))


def typed_smiles(smiles, n_labels):
    """Return the molecules of the command line, their labels unknown."""
    where = ['--smiles %d' % i for i in range(1, len(smiles) + 1)]
    labels = numpy.full((len(smiles), n_labels), numpy.nan)
    table = pandas.DataFrame(index=range(len(smiles)))
    return Rows(numpy.array(where, object), numpy.array(smiles, object), labels, table)


def read_csv(path, smiles_column, columns, task, missing='refuse', others=False):
    """Read the SMILES and the labels of a CSV file, plain or compressed.

    Args:
        path (str): the file.
        smiles_column (str): name of the column of SMILES.
        columns (sequence of str): of the labels.
        task (tasks.Regression or tasks.Classification): says which labels are good.
        missing (str): what becomes of a molecule without a label that the task needs: 'refuse' the
            file, 'skip' the molecule, or 'keep' it, even if the file lacks the column.
        others (bool): whether to read the other columns, too.

    Returns:
        Rows: the molecules; lines without SMILES and labels are left out.

    Raises:
        DataError: the file or a column is missing, or a label is not what the task expects.
    """
    if not os.path.isfile(path):
        raise DataError('data file not found: %s' % os.path.abspath(path))
    wanted = [smiles_column, *columns]
    try:
        header = pandas.read_csv(path, nrows=1, header=None, **READ).iloc[0].tolist()
        raw = pandas.read_csv(
            path,
            skip_blank_lines=False,  # the other rows keep their numbers
            # Without these, rows with more cells would be an error, or shift the columns.
            usecols=[i for i, name in enumerate(header) if others or name in wanted],
            index_col=False,
            **READ,
        ).fillna('')
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataError('%s cannot be read as CSV: %s' % (path, error)) from error
    _check_header(path, header, wanted, wanted[:1] if missing == 'keep' else wanted)
    known = [name for name in wanted if name in raw]
    _check_text(path, raw[known].to_numpy().ravel())
    raw = raw[(raw[known] != '').any(axis=1)]
    where = numpy.array(
        ['%s row %d' % (os.path.basename(path), i + 2) for i in raw.index.tolist()], object
    )
    labels = numpy.full((len(raw), len(columns)), numpy.nan)
    for i, column in enumerate(columns):
        if column in raw:
            labels[:, i] = _labels_of(where, raw[column], task, missing)
    others = raw.drop(columns=known).reset_index(drop=True)
    rows = Rows(where, raw[smiles_column].to_numpy(object), labels, others)
    return _without_missing(rows, columns, task) if missing == 'skip' else rows


def _check_header(path, header, wanted, needed):
    """Refuse a file that lacks columns, or has one of those wanted twice."""
    lacking = [name for name in needed if name not in header]
    if lacking:
        _check_text(path, header)
        separated = len(header) == 1 and any(character in header[0] for character in ';\t|')
        raise DataError(
            '%s has no column %s; expected the columns %s, found %s%s'
            % (
                path,
                *(', '.join(map(repr, names)) for names in (lacking, wanted, header)),
                '; columns must be separated by commas' if separated else '',
            )
        )
    for column in wanted:
        if header.count(column) > 1:
            raise DataError('%s has %d columns %r' % (path, header.count(column), column))


def _check_text(path, cells):
    """Refuse cells that are not UTF-8; other cells may be, they are only copied."""
    try:
        ''.join(cells).encode()
    except UnicodeEncodeError:
        raise DataError(
            '%s cannot be read as CSV: it is not text in UTF-8; a compressed file needs the '
            'ending of its kind, such as .gz' % path
        ) from None


def _labels_of(where, cells, task, missing):
    """Return the labels of a column, (M,) float64, NaN where there is none."""
    text = cells.str.strip()
    values = pandas.to_numeric(text, errors='coerce').to_numpy(numpy.float64)
    values = numpy.where(task.is_good(values), values, numpy.nan)
    is_empty = text.str.lower().isin(MISSING).to_numpy()
    may_be_empty = task.may_be_missing or missing != 'refuse'
    bad = numpy.flatnonzero(numpy.isnan(values) & ~(is_empty & may_be_empty))
    if bad.size:
        message = '%s: target %s is %r, expected %s (%d such rows%s)' % (
            where[bad[0]],
            cells.name,
            shortened(text.iloc[bad[0]]),
            task.expected,
            bad.size,
            '; --skip-missing leaves empty ones out' if is_empty[bad].any() else '',
        )
        if missing != 'keep':
            raise DataError(message)
        print('Unknown labels: ' + message)
    return values


def shortened(text):
    """Return a text, or the beginning of a long one."""
    return text if len(text) <= 60 else text[:57] + '...'


def _without_missing(rows, columns, task):
    """Return the rows that have the labels that their task needs; count the others."""
    known = ~numpy.isnan(rows.labels)
    kept = known.any(axis=1) if task.may_be_missing else known.all(axis=1)
    if not kept.all():
        print(
            'Skipped %d molecule(s) without %s of %s, the first: %s'
            % (
                (~kept).sum(),
                'any label' if task.may_be_missing else 'each label',
                ', '.join(columns),
                rows.where[~kept][0],
            )
        )
    return rows.take(numpy.flatnonzero(kept))


def spread(n, num_data):
    """Return `num_data` numbers spread evenly over range(n); -1 means all of them.

    Data are often sorted by size: the first molecules would be the smallest only.
    """
    num_data = n if num_data < 0 else min(num_data, n)
    return numpy.arange(num_data) * n // max(num_data, 1)


def report_duplicates(rows):
    """Print how many molecules have the SMILES of an earlier one."""
    again = pandas.Series(rows.smiles).duplicated()
    if again.any():
        smiles = rows.smiles[again][0]
        print(
            'Duplicates: %d molecule(s) have the SMILES of an earlier one, the first: %s: %r; '
            'test molecules may be among those of the training'
            % (again.sum(), ' and '.join(rows.where[rows.smiles == smiles][:2]), smiles)
        )


def digest(rows):
    """Return a short text that changes with the SMILES, the labels or their order."""
    state = hashlib.sha256('\n'.join(rows.smiles).encode('utf-8', 'surrogatepass'))
    state.update(numpy.ascontiguousarray(rows.labels).tobytes())
    return state.hexdigest()[:16]


def sparse_dataset(smiles, method, labels, cache):
    """Turn SMILES into a sparse data set, without dense matrices; also {position: failure}."""
    try:
        found = from_smiles(smiles, method, labels, cache=cache)
    except ValueError:
        preprocessor = preprocess_method_dict[method]()
        with rdBase.BlockLogs():
            reasons = [dense_graph(text, preprocessor)[1] for text in smiles]
        if None in reasons:
            raise
        return (), dict(enumerate(reasons))  # no molecule is left
    failures = {failure.position: failure.reason for failure in found.failures}
    molecules = found.dataset.molecules
    largest = numpy.zeros(len(molecules), int)
    numpy.maximum.at(
        largest, numpy.repeat(numpy.arange(len(molecules)), molecules.sizes), molecules.atoms
    )
    reasons = list(map(what_is_wrong, molecules.sizes.tolist(), largest.tolist()))
    failures.update({int(found.kept[i]): reason for i, reason in enumerate(reasons) if reason})
    is_good = numpy.array([reason is None for reason in reasons])
    return (found.dataset if is_good.all() else found.dataset[is_good]), failures


def dense_dataset(smiles, method, labels):
    """Turn SMILES into upstream's dense data set; also return {position: failure}."""
    preprocessor = preprocess_method_dict[method]()
    examples, failures = [], {}
    # disable=None: a progress bar on a terminal, none in a file or pipe.
    with rdBase.BlockLogs():  # the reasons are listed instead
        for i, text in enumerate(tqdm(smiles, desc='preprocessing', leave=False, disable=None)):
            arrays, reason = dense_graph(text, preprocessor)
            if reason:
                failures[i] = reason
            else:
                examples.append(arrays)
    columns = []
    for values in zip(*examples):
        # asarray would stack molecules that happen to have one size.
        columns.append(numpy.empty(len(values), dtype=object))
        for i, value in enumerate(values):
            columns[-1][i] = value
    return NumpyTupleDataset(*columns, numpy.delete(labels, list(failures), axis=0)), failures


def dense_graph(smiles, preprocessor):
    """Return (upstream's arrays of one molecule, None), or (None, the reason for the failure)."""
    mol = Chem.MolFromSmiles(smiles)
    if mol is None:
        return None, 'RDKit cannot parse it'
    numbers = [atom.GetAtomicNum() for atom in mol.GetAtoms()]
    reason = what_is_wrong(len(numbers), max(numbers, default=0))
    if reason:
        return None, reason
    try:
        # Upstream's preprocessors take the molecule of the canonical SMILES.
        _, mol = preprocessor.prepare_smiles_and_mol(mol)
        return preprocessor.get_input_features(mol), None
    except (MolFeatureExtractionError, ValueError, KeyError, RuntimeError) as error:
        return None, '%s: %s' % (type(error).__name__, error)


def what_is_wrong(n_atoms, largest):
    """Return why no model accepts a molecule of this size and largest atomic number, or None."""
    if n_atoms == 0:
        return 'no atoms'
    if largest >= MAX_ATOMIC_NUM:
        return 'atomic number %d, the models support those below %d' % (largest, MAX_ATOMIC_NUM)
    return None


def preprocess(rows, method, labels, dense=False, cache=False):
    """Return (the data set of a method, the rows that it holds, a table of those that failed).

    The data set is sparse, or upstream's dense one; `labels` (M, T) are as the task needs them.
    `cache` keeps the molecules of a sparse one on disk.
    """
    if not len(rows.smiles):
        raise DataError('the data have no molecules')
    if dense:
        dataset, reasons = dense_dataset(rows.smiles, method, labels)
    else:
        dataset, reasons = sparse_dataset(rows.smiles, method, labels, cache)
    bad = sorted(reasons)
    failures = pandas.DataFrame(
        {'row': rows.where[bad], 'smiles': rows.smiles[bad], 'reason': [reasons[i] for i in bad]}
    )
    if len(bad) == len(rows.smiles):
        raise DataError(
            'none of the %d molecule(s) can be used, the first: %s: %r: %s'
            % (len(bad), *failures.iloc[0])
        )
    return dataset, numpy.delete(numpy.arange(len(rows.smiles)), bad), failures


def load(description, rows, task, method, num_data, dense, cache=False):
    """Print what there is of `num_data` molecules; return (data set, rows, kept, failures)."""
    n_rows = len(rows.smiles)
    rows = rows.take(spread(n_rows, num_data))
    dataset, kept, failures = preprocess(rows, method, task.labels(rows.labels), dense, cache)
    used = '' if len(kept) == n_rows else ', %d of them used' % len(kept)
    print('Data: %s: %d molecules%s' % (description, n_rows, used))
    print('%s: %s' % ('Target' if len(task.names) == 1 else 'Targets', ', '.join(task.titles())))
    return dataset, rows, kept, failures


def split_indices(n, train_data_ratio, seed, smiles=None):
    """Split range(n) into training, validation and test part; the latter halve the rest.

    With `smiles` by scaffold, Chainer Chemistry's way: molecules with one scaffold are in one part.
    """
    if smiles is None:
        order = numpy.random.RandomState(seed).permutation(n)
        n_train = int(n * train_data_ratio)
        parts = numpy.split(order, [n_train, n_train + (n - n_train) // 2])
    else:
        rest = (1 - train_data_ratio) / 2
        parts = ScaffoldSplitter().train_valid_test_split(
            numpy.arange(n), smiles, train_data_ratio, rest, rest, seed=seed
        )
    if not all(map(len, parts)):
        raise DataError(
            'a %s split of %d with --train-data-ratio %g has an empty part; expected at least one '
            'each for training, validation and test'
            % ('random' if smiles is None else 'scaffold', n, train_data_ratio)
        )
    return [numpy.asarray(part, int) for part in parts]


def split(smiles, settings):
    """Split molecules into training, validation and test part as the settings of a run say."""
    is_by_scaffold = settings.get('split') == 'scaffold'
    return split_indices(
        len(smiles),
        settings['train_data_ratio'],
        settings['seed'],
        smiles if is_by_scaffold else None,
    )
