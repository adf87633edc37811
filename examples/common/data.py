"""Read CSV files, turn SMILES into graphs, split data sets."""

import csv
import hashlib
import os
import zlib

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import numpy
import pandas
from chainer_bspmm.dataset import from_smiles
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.dataset.preprocessors.common import MolFeatureExtractionError
from chainer_chemistry.datasets import NumpyTupleDataset
from rdkit import Chem
from rdkit import rdBase
from tqdm import tqdm


NAMED = ('sample', 'full', 'download')  # values of --data that are not files


NOT_TEXT = (
    '%s cannot be read as CSV: it is not text in UTF-8; a compressed file needs the ending of its '
    'kind, such as .gz'
)
OWN_COLUMNS = 'where', 'smiles'  # of a table of molecules, before the labels
MISSING = ('', 'na', 'n/a', 'nan', 'none', 'null')  # cells without a label, in any case


class DataError(ValueError):
    """Data or options that cannot be used; the message is meant for the user."""


def read_csv(path, smiles_column, columns, task, missing='refuse'):
    """Read the SMILES and the labels of a CSV file, plain or compressed.

    Args:
        path (str): the file.
        smiles_column (str): name of the column of SMILES.
        columns (dict): {label: name of its column}.
        task (tasks.Regression or tasks.Classification): says which labels are good.
        missing (str): what becomes of a molecule without a label that the task needs: 'refuse' the
            file, 'skip' the molecule, or 'keep' it, even if the file lacks the column.

    Returns:
        pandas.DataFrame: columns `where` ('FILE row N', the header being row 1), `smiles` (str),
        and one float64 column for each label; NaN where it is missing.

    Raises:
        DataError: the file or a column is missing, or a label is not what the task expects.
    """
    if not os.path.isfile(path):
        raise DataError('data file not found: %s' % os.path.abspath(path))
    for label in columns:
        if label in OWN_COLUMNS:
            raise DataError(
                'a label cannot be called %s, as the table of molecules has a column of that name; '
                'rename it in the file' % label
            )
    wanted = [smiles_column] + list(columns.values())
    try:
        # Cells that are not needed may hold anything.
        header = _header(path)
        # As text, so that a bad label can be shown as it stands in the file.
        raw = pandas.read_csv(
            path,
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            usecols=[name for name in header if name in wanted],
            index_col=False,  # no index of the first column where the first row has more cells
            encoding_errors='replace',
        )
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataError('%s cannot be read as CSV: %s' % (path, error)) from error
    if '\ufffd' in ''.join(header) or any(raw[name].str.contains('\ufffd').any() for name in raw):
        raise DataError(NOT_TEXT % path)
    needed = wanted[:1] if missing == 'keep' else wanted
    lacking = [name for name in needed if name not in header]
    if lacking:
        separated = len(header) == 1 and any(character in header[0] for character in ';\t|')
        raise DataError(
            '%s has no column %s; expected the columns %s, found %s%s'
            % (
                path,
                ', '.join(lacking),
                ', '.join(wanted),
                ', '.join(header),
                '; columns must be separated by commas' if separated else '',
            )
        )
    for column in wanted:
        if header.count(column) > 1:
            raise DataError('%s has %d columns %s' % (path, header.count(column), column))
    raw = raw.fillna('').astype(object)
    raw = raw[(raw != '').any(axis=1)]  # drops blank lines; the other rows keep their numbers
    name = os.path.basename(path)
    frame = pandas.DataFrame(
        {
            'where': ['%s row %d' % (name, row) for row in (raw.index + 2).tolist()],
            'smiles': raw[smiles_column].to_numpy(),
        }
    )
    for label, column in columns.items():
        if column not in raw:
            frame[label] = numpy.nan
            continue
        values = pandas.to_numeric(raw[column], errors='coerce').to_numpy(dtype=numpy.float64)
        bad = numpy.flatnonzero(~task.is_good(values))
        text = raw[column].iloc[bad].str.strip().to_numpy()
        is_missing = numpy.isin([word.lower() for word in text], MISSING)
        if task.may_be_missing or missing != 'refuse':
            bad, text, is_missing = bad[~is_missing], text[~is_missing], ()
        if bad.size:
            raise DataError(
                '%s: target %s is %r, expected %s (%d such rows%s)'
                % (
                    frame['where'][bad[0]],
                    column,
                    text[0],
                    task.expected,
                    bad.size,
                    '; --skip-missing leaves empty ones out' if any(is_missing) else '',
                )
            )
        frame[label] = values
    return without_missing(frame, task) if missing == 'skip' else frame


def _header(path):
    """Return the names of the columns of a CSV file (list of str), even if one is there twice."""
    row = pandas.read_csv(
        path, nrows=1, header=None, dtype=str, keep_default_na=False, encoding_errors='replace'
    )
    return row.iloc[0].tolist()


def without_missing(table, task):
    """Return the rows of a table that have the labels that their task needs; count the others."""
    known = table[list(task.names)].notna()
    kept = known.any(axis=1) if task.may_be_missing else known.all(axis=1)
    if not kept.all():
        print(
            'Skipped %d molecule(s) without %s of %s, the first: %s'
            % (
                (~kept).sum(),
                'any label' if task.may_be_missing else 'each label',
                ', '.join(task.names),
                table['where'][~kept].iloc[0],
            )
        )
    return table[kept].reset_index(drop=True)


def report_duplicates(table):
    """Print how many molecules have the SMILES of an earlier one."""
    again = table['smiles'].duplicated()
    if again.any():
        smiles = table['smiles'][again].iloc[0]
        print(
            'Duplicates: %d molecule(s) have the SMILES of an earlier one, the first: %s: %r; '
            'test molecules may be among those of the training'
            % (again.sum(), ' and '.join(table['where'][table['smiles'] == smiles][:2]), smiles)
        )


def typed_smiles(smiles, names):
    """Return the table of molecules from the command line, their labels unknown."""
    table = pandas.DataFrame(
        {'where': ['--smiles %d' % i for i in range(1, len(smiles) + 1)], 'smiles': smiles}
    )
    return table.assign(**{name: numpy.nan for name in names})


def digest(table, task):
    """Return a short text that changes with the SMILES, the labels or their order."""
    state = hashlib.sha256('\n'.join(table['smiles']).encode('utf-8', 'surrogatepass'))
    state.update(numpy.ascontiguousarray(table[list(task.names)], numpy.float64).tobytes())
    return state.hexdigest()[:16]


def other_columns(path, table):
    """Return what the file of a table of :func:`read_csv` has besides, as text, row by row."""
    if path in NAMED:
        return pandas.DataFrame(index=table.index)
    raw = pandas.read_csv(
        path,
        dtype=str,
        keep_default_na=False,
        skip_blank_lines=False,
        # Without these, rows with more cells would be an error, or shift the columns.
        usecols=range(len(_header(path))),
        index_col=False,
        encoding_errors='replace',  # only SMILES and labels need be UTF-8
    )
    rows = [int(where.rpartition(' ')[2]) - 2 for where in table['where']]
    raw = raw.loc[rows].set_index(table.index)
    known = {
        'smiles',
        *table.columns[2:],
        *(name for name in raw if (raw[name] == table['smiles']).all()),
    }
    return raw[[name for name in raw if name not in known]]


def thin_out(table, num_data):
    """Return `num_data` rows spread evenly over the table; -1 means all of them.

    Data are often sorted by size: the first rows would be the smallest molecules only.
    """
    if num_data < 0 or num_data >= len(table):
        return table
    return table.iloc[numpy.arange(num_data) * len(table) // num_data].reset_index(drop=True)


def sparse_dataset(table, method, labels, cache):
    """Turn a table of SMILES into a sparse data set, without dense matrices."""
    try:
        found = from_smiles(table['smiles'], method, labels, cache=cache)
    except ValueError:
        _, reasons = dense_dataset(table, method, labels)
        if len(reasons) < len(table):
            raise
        return (), reasons  # no molecule is left
    failures = {failure.position: failure.reason for failure in found.failures}
    molecules = found.dataset.molecules
    largest = numpy.zeros(len(molecules), int)
    numpy.maximum.at(
        largest, numpy.repeat(numpy.arange(len(molecules)), molecules.sizes), molecules.atoms
    )
    is_wrong = (molecules.sizes == 0) | (largest >= MAX_ATOMIC_NUM)
    for i in numpy.flatnonzero(is_wrong).tolist():
        failures[int(found.kept[i])] = what_is_wrong(molecules.sizes[i], largest[i])
    return (found.dataset[~is_wrong] if is_wrong.any() else found.dataset), failures


def dense_dataset(table, method, labels):
    """Turn a table of SMILES into upstream's dense data set."""
    preprocessor = preprocess_method_dict[method]()
    examples, kept, failures = [], [], {}
    # disable=None: a progress bar on a terminal, none in a file or pipe.
    with rdBase.BlockLogs():  # the reasons are listed instead
        for i, smiles in enumerate(
            tqdm(table['smiles'], desc='preprocessing', leave=False, disable=None)
        ):
            features, failures[i] = dense_graph(smiles, preprocessor)
            if features is not None:
                del failures[i]
                examples.append(features)
                kept.append(i)
    columns = []
    for values in zip(*examples):
        # asarray would stack molecules that happen to have one size.
        column = numpy.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            column[i] = value
        columns.append(column)
    return NumpyTupleDataset(*columns, labels[kept]), failures


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


def preprocess(table, method, labels, dense=False, cache=False):
    """Turn a table of SMILES into the data set of a method.

    Args:
        table (pandas.DataFrame): as of :func:`read_csv`.
        method (str): a key of upstream's `preprocess_method_dict`.
        labels (numpy.ndarray): (M, T), one row for each of the table.
        dense (bool): upstream's dense data set instead of the sparse one.
        cache (bool): whether to keep the molecules of the sparse one on disk, and look there.

    Returns:
        tuple: (SparseDataset or NumpyTupleDataset of (atoms, adj, ..., labels); the rows of the
        table it holds (list of int); failures: list of (where, SMILES, reason)).

    Raises:
        DataError: no molecule is left.
    """
    if dense:
        dataset, reasons = dense_dataset(table, method, labels)
    else:
        dataset, reasons = sparse_dataset(table, method, labels, cache)
    failures = [
        (table['where'].iloc[i], table['smiles'].iloc[i], reasons[i]) for i in sorted(reasons)
    ]
    kept = [i for i in range(len(table)) if i not in reasons]
    if table.empty:
        raise DataError('the data have no molecules')
    if not kept:
        raise DataError(
            'none of the %d molecule(s) can be used%s'
            % (len(table), ', the first: %s: %r: %s' % failures[0])
        )
    return dataset, kept, failures


def report_failures(failures, path, shown=10):
    """Print how many molecules were left out, and list all of them in the CSV file `path`."""
    if os.path.exists(path):
        os.remove(path)  # of an earlier run
    if not failures:
        return
    with open(path, 'w', encoding='utf-8', newline='') as f:
        csv.writer(f, lineterminator='\n').writerows([('row', 'smiles', 'reason'), *failures])
    print('%d molecule(s) could not be used, all listed in %s' % (len(failures), path))
    for where, smiles, reason in failures[:shown]:
        short = smiles if len(smiles) <= 60 else smiles[:57] + '...'
        print('  %s: %r: %s' % (where, short, reason))
    if 0 < shown < len(failures):
        print('  ... and %d more' % (len(failures) - shown))


def load(description, table, task, method, num_data, failed_file, dense, cache=False):
    """Preprocess the table of a run, and print what it holds.

    Returns:
        tuple: (data set, the table (DataFrame), the rows of the table that the data set holds).
    """
    n_rows = len(table)
    table = thin_out(table, num_data)
    dataset, kept, failures = preprocess(table, method, task.labels(table), dense, cache)
    print(
        'Data: %s: %d molecules%s'
        % (description, n_rows, '' if len(kept) == n_rows else ', %d of them used' % len(kept))
    )
    print('%s: %s' % ('Target' if len(task.names) == 1 else 'Targets', ', '.join(task.titles())))
    report_failures(failures, failed_file)
    return dataset, table, kept


def split_indices(n, train_data_ratio, seed):
    """Split range(n) randomly into training, validation and test part.

    Args:
        n (int): number of molecules or nodes.
        train_data_ratio (float): share of the training part; the others halve the rest.
        seed (int): decides the split.

    Returns:
        tuple: three int arrays, (train, validation, test).

    Raises:
        DataError: one of the parts would be empty.
    """
    order = numpy.random.RandomState(seed).permutation(n)
    n_train = int(n * train_data_ratio)
    n_valid = (n - n_train) // 2
    if min(n_train, n_valid) < 1:
        raise DataError(
            '--train-data-ratio: %g of %d leaves a part of the split empty; expected at least one '
            'each for training, validation and test' % (train_data_ratio, n)
        )
    return numpy.split(order, [n_train, n_train + n_valid])
