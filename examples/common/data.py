"""Read CSV files, turn SMILES into graphs, split data sets."""

import hashlib
import os
import typing
import warnings
import zlib

import numpy
import pandas
from chainer_bspmm.dataset import from_smiles
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.dataset.splitters.scaffold_splitter import ScaffoldSplitter
from chainer_chemistry.datasets import NumpyTupleDataset
from rdkit import Chem, rdBase
from tqdm import tqdm

MISSING = ('', 'na', 'n/a', 'nan', 'none', 'null')  # cells without a label, in any case


class DataError(ValueError):
    """Data or options that cannot be used; the message is meant for the user."""


class Rows(typing.NamedTuple):
    """Molecules of a file or of the command line."""

    where: numpy.ndarray  # (M,) of str: 'FILE row N', the header being row 1
    smiles: numpy.ndarray  # (M,) of str
    labels: numpy.ndarray  # (M, T) float64, NaN where one is missing
    others: pandas.DataFrame  # the other columns, as text
    reason: numpy.ndarray  # (M,) of str: why a molecule cannot be used, '' if it can

    def take(self, index):
        """Return some of the rows."""
        where, smiles, labels, others, reason = self
        return Rows(where[index], smiles[index], labels[index], others.iloc[index], reason[index])


def join(parts):
    """Return the rows of several files."""
    where, smiles, labels, others, reason = zip(*parts)
    where, smiles, labels, reason = map(numpy.concatenate, (where, smiles, labels, reason))
    return Rows(where, smiles, labels, pandas.concat(others, ignore_index=True), reason)


def typed_smiles(smiles, n_labels):
    """Return the molecules of the command line, their labels unknown."""
    n = len(smiles)
    where = numpy.array(['--smiles %d' % i for i in range(1, n + 1)], object)
    labels = numpy.full((n, n_labels), numpy.nan)
    others = pandas.DataFrame(index=range(n))
    return Rows(where, numpy.array(smiles, object), labels, others, numpy.full(n, '', object))


def read_csv(path, smiles_column, task, columns=None, missing='refuse', others=False):
    """Return the rows of a CSV file, plain or compressed, but lines without SMILES and labels.

    The labels' columns are called as the task calls them, or `columns`. `missing` says what becomes
    of a molecule without a label that the task needs: 'refuse' the file, 'skip' the molecule, or
    'keep' it, even if the file lacks the column. `others` asks for the other columns, too.
    """
    columns = columns or task.names
    wanted = [smiles_column, *columns]
    options = {'dtype': str, 'keep_default_na': False}
    try:
        header = pandas.read_csv(path, nrows=1, header=None, **options).iloc[0].tolist()
        table = pandas.read_csv(
            path,
            skip_blank_lines=False,  # the other rows keep their numbers
            # Without these, rows with more cells would be an error, or shift the columns.
            usecols=[i for i, name in enumerate(header) if others or name in wanted],
            index_col=False,
            **options,
        ).fillna('')
    except FileNotFoundError:
        raise DataError('data file not found: %s' % os.path.abspath(path)) from None
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataError('%s cannot be read as CSV: %s' % (path, error)) from error
    for name in wanted:
        if header.count(name) > 1:
            raise DataError('%s has %d columns %r' % (path, header.count(name), name))
        if name not in header and (missing != 'keep' or name == smiles_column):
            raise DataError(
                '%s has no column %r; expected the columns %s, separated by commas, found %s'
                % (path, name, ', '.join(map(repr, wanted)), ', '.join(map(repr, header)))
            )
    known = [name for name in wanted if name in table]
    table = table[(table[known] != '').any(axis=1)]
    name = os.path.basename(path)
    where = numpy.array(['%s row %d' % (name, i + 2) for i in table.index.tolist()], object)
    labels = numpy.full((len(table), len(columns)), numpy.nan)
    for i, column in enumerate(columns):
        if column in table:
            labels[:, i] = _labels_of(where, table[column], task, missing)
    smiles = table[smiles_column].to_numpy(object)
    others = table.drop(columns=known)
    rows = Rows(where, smiles, labels, others, numpy.full(len(table), '', object))
    if missing != 'skip':
        return rows
    is_known = ~numpy.isnan(labels)
    kept = is_known.any(axis=1) if task.may_be_missing else is_known.all(axis=1)
    if not kept.all():
        which = 'any label' if task.may_be_missing else 'each label'
        text = 'Skipped %d molecule(s) without %s of %s, the first: %s'
        print(text % ((~kept).sum(), which, ', '.join(columns), where[~kept][0]))
    return rows.take(kept)


def _labels_of(where, cells, task, missing):
    """Return the labels of a column, (M,) float64, NaN where there is none."""
    text = cells.str.strip()
    values = pandas.to_numeric(text, errors='coerce').to_numpy(numpy.float64)
    values = numpy.where(task.is_good(values), values, numpy.nan)
    is_empty = text.str.lower().isin(MISSING).to_numpy()
    may_be_empty = task.may_be_missing or missing != 'refuse'
    bad = numpy.flatnonzero(numpy.isnan(values) & ~(is_empty & may_be_empty))
    if bad.size:
        advice = '; --skip-missing leaves empty ones out' if is_empty[bad].any() else ''
        message = '%s: target %s is %.60r, expected %s (%d such rows%s)' % (
            where[bad[0]],
            cells.name,
            text.iloc[bad[0]],
            task.expected,
            bad.size,
            advice,
        )
        if missing != 'keep':
            raise DataError(message)
        print('Unknown labels: ' + message)
    return values


def spread(n, num_data):
    """Return `num_data` numbers spread evenly over range(n); -1 means all of them."""
    # Data are often sorted by size: the first molecules would be the smallest only.
    num_data = n if num_data < 0 else min(num_data, n)
    return numpy.arange(num_data) * n // max(num_data, 1)


def report_duplicates(rows):
    """Print how many molecules have the SMILES of an earlier one."""
    again = numpy.flatnonzero(pandas.Series(rows.smiles).duplicated())
    if again.size:
        print(
            'Duplicates: %d molecule(s) have the SMILES of an earlier one, the first: %s: %r; '
            'test molecules may be among those of the training'
            % (again.size, rows.where[again[0]], rows.smiles[again[0]])
        )


def digest(rows):
    """Return a short text that changes with the SMILES, the labels or their order."""
    state = hashlib.sha256('\n'.join(rows.smiles).encode())
    state.update(numpy.ascontiguousarray(rows.labels).tobytes())
    return state.hexdigest()[:16]


def sparse_dataset(smiles, method, labels):
    """Turn SMILES into a sparse data set, without dense matrices; also {position: failure}."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'from_smiles: ')  # the tools list every such row
            found = from_smiles(smiles, method, labels, cache=True)
    except ValueError as error:  # no molecule is left
        raise DataError(str(error)) from error
    failures = {failure.position: failure.reason for failure in found.failures}
    molecules = found.dataset.molecules
    owner = numpy.repeat(numpy.arange(len(molecules)), molecules.sizes)
    is_bad = molecules.sizes == 0
    is_bad[owner[molecules.atoms >= MAX_ATOMIC_NUM]] = True
    for i in numpy.flatnonzero(is_bad).tolist():
        failures[int(found.kept[i])] = what_is_wrong(molecules.atoms[owner == i].tolist())
    return (found.dataset[~is_bad] if is_bad.any() else found.dataset), failures


def dense_dataset(smiles, method, labels):
    """Turn SMILES into upstream's dense data set; also return {position: failure}."""
    preprocessor = preprocess_method_dict[method]()
    examples = []
    failures = {}
    # disable=None: a progress bar on a terminal, none in a file or pipe.
    with rdBase.BlockLogs():  # the reasons are listed instead
        for i, text in enumerate(tqdm(smiles, desc='preprocessing', leave=False, disable=None)):
            try:
                mol = Chem.MolFromSmiles(text)
                if mol is None:
                    raise ValueError('RDKit cannot parse it')
                reason = what_is_wrong([atom.GetAtomicNum() for atom in mol.GetAtoms()])
                if reason:
                    raise ValueError(reason)
                # Upstream's parsers take the molecule of the canonical SMILES.
                _, mol = preprocessor.prepare_smiles_and_mol(mol)
                examples.append(preprocessor.get_input_features(mol))
            except Exception as error:  # upstream's parsers skip a molecule for any, too
                failures[i] = str(error)
    # Not numpy.array: it would stack molecules that happen to have one size.
    columns = [pandas.Series(list(values), dtype=object).to_numpy() for values in zip(*examples)]
    return NumpyTupleDataset(*columns, numpy.delete(labels, list(failures), axis=0)), failures


def what_is_wrong(atoms):
    """Return why no model accepts a molecule of these atomic numbers, or None."""
    if not atoms:
        return 'no atoms'
    if max(atoms) >= MAX_ATOMIC_NUM:
        return 'atomic number %d, the models support those below %d' % (max(atoms), MAX_ATOMIC_NUM)
    return None


def preprocess(rows, task, method, dense=False):
    """Return (the data set of a method, sparse or upstream's dense one; the rows with reasons)."""
    n = len(rows.smiles)
    if not n:
        raise DataError('the data have no molecules')
    to_dataset = dense_dataset if dense else sparse_dataset
    dataset, reasons = to_dataset(rows.smiles, method, task.labels(rows.labels))
    if len(reasons) == n:
        raise DataError(
            'none of the %d molecule(s) can be used, the first: %s: %r: %s'
            % (n, rows.where[0], rows.smiles[0], reasons[0])
        )
    reason = numpy.array([reasons.get(i, '') for i in range(n)], object)
    return dataset, rows._replace(reason=reason)


def load(description, rows, task, method, num_data=-1, dense=False):
    """Print what there is of `num_data` molecules; return (data set, rows with reasons)."""
    n_rows = len(rows.smiles)
    rows = rows.take(spread(n_rows, num_data))
    dataset, rows = preprocess(rows, task, method, dense)
    used = '' if len(dataset) == n_rows else ', %d of them used' % len(dataset)
    print('Data: %s: %d molecules%s' % (description, n_rows, used))
    print('%s: %s' % ('Target' if len(task.names) == 1 else 'Targets', ', '.join(task.titles())))
    return dataset, rows


def split(examples, settings):
    """Return the indices of training, validation and test part; the latter halve the rest.

    If the settings of the run say by scaffold, `examples` are SMILES. This is Chainer Chemistry's
    way: molecules with one scaffold are in one part.
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
            numpy.arange(n), examples, ratio, rest, rest, seed=seed
        )
    if not all(map(len, parts)):
        raise DataError(
            'a %s split of %d with --train-data-ratio %g has an empty part; expected at least one '
            'each for training, validation and test' % (settings['split'], n, ratio)
        )
    return [numpy.asarray(part, int) for part in parts]
