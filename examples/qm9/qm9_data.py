"""QM9 for the scripts beside this file: read a CSV file, turn SMILES into graphs, split."""
import importlib.util
import os
import tarfile

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
import numpy
import pandas
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.dataset.preprocessors.common import MolFeatureExtractionError
from chainer_chemistry.datasets import NumpyTupleDataset
from rdkit import Chem
from rdkit import rdBase
from tqdm import tqdm

SAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', 'qm9_sample.csv.gz')

# Upstream's names of the 15 targets -> (unit, column in qm9pack's files, what it is).
TARGETS = {
    'A': ('GHz', 'RotA_GHz', 'rotational constant A'),
    'B': ('GHz', 'RotB_GHz', 'rotational constant B'),
    'C': ('GHz', 'RotC_GHz', 'rotational constant C'),
    'mu': ('D', 'Dipole_debye', 'dipole moment'),
    'alpha': ('bohr^3', 'Polarizability_bohr3', 'isotropic polarizability'),
    'homo': ('hartree', 'HOMO_au', 'energy of the highest occupied orbital'),
    'lumo': ('hartree', 'LUMO_au', 'energy of the lowest unoccupied orbital'),
    'gap': ('hartree', 'HOMO_LUMO_gap_au', 'lumo - homo'),
    'r2': ('bohr^2', 'R2_bohr2', 'electronic spatial extent'),
    'zpve': ('hartree', 'ZPVE_au', 'zero-point vibrational energy'),
    'U0': ('hartree', 'InternalEnergy_0K_au', 'internal energy at 0 K'),
    'U': ('hartree', 'InternalEnergy_298K_au', 'internal energy at 298.15 K'),
    'H': ('hartree', 'Enthalphy_298K_au', 'enthalpy at 298.15 K'),
    'G': ('hartree', 'GibbsFreeEnergy_298K_au', 'free energy at 298.15 K'),
    'Cv': ('cal/(mol K)', 'Heatcapacity_Cv_cal_mol_K', 'heat capacity at 298.15 K'),
}


class DataError(ValueError):
    """A data file that cannot be used; the message is meant for the user."""


def target_names(label):
    """Return the targets that `--label` stands for: one of them, or all 15 of 'all'."""
    return list(TARGETS) if label == 'all' else [label]


def unit(name):
    """Return the unit of a target."""
    return TARGETS[name][0]


def qm9pack_files():
    """Return the paths of qm9pack's CSV files, or [] where the package is not installed.

    The package is located, not imported: importing it needs pkg_resources.
    """
    spec = importlib.util.find_spec('qm9pack')
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = os.path.join(spec.submodule_search_locations[0], 'data')
    paths = [os.path.join(folder, 'qm9_part%d.csv' % part) for part in (1, 2, 3)]
    return paths if all(os.path.exists(path) for path in paths) else []


def read_csv(path, smiles_column, target_columns, need_targets=True):
    """Read the SMILES and the targets of a CSV file, plain or compressed.

    Args:
        path (str): the file.
        smiles_column (str): name of the column of SMILES.
        target_columns (dict): {target: name of its column}.
        need_targets (bool): if not, missing columns and empty cells of targets become NaN.

    Returns:
        pandas.DataFrame: columns `where` ('FILE row N', the header being row 1), `smiles` (str),
        and one float64 column for each target.

    Raises:
        DataError: the file or a column is missing, or a target is not a finite number.
    """
    if not os.path.isfile(path):
        raise DataError('data file not found: %s' % path)
    wanted = [smiles_column] + list(target_columns.values())
    try:
        header = list(pandas.read_csv(path, nrows=0).columns)
        # As text, so that a bad number can be shown as it stands in the file.
        raw = pandas.read_csv(path, dtype=str, keep_default_na=False, skip_blank_lines=False,
                              usecols=[name for name in header if name in wanted])
    except (ValueError, OSError, EOFError) as error:
        raise DataError('%s cannot be read as CSV: %s' % (path, error)) from error
    missing = [name for name in (wanted if need_targets else wanted[:1]) if name not in header]
    if missing:
        raise DataError('%s has no column %s; expected the columns %s, found %s' % (
            path, ', '.join(missing), ', '.join(wanted), ', '.join(header)))
    raw = raw.fillna('').astype(object)
    raw = raw[(raw != '').any(axis=1)]  # blank lines go, but count in the numbers of the others
    name = os.path.basename(path)
    frame = pandas.DataFrame({'where': ['%s row %d' % (name, row + 2) for row in raw.index],
                              'smiles': raw[smiles_column].to_numpy()})
    for target, column in target_columns.items():
        if column not in raw:
            frame[target] = numpy.nan
            continue
        text = raw[column].to_numpy()
        values = pandas.to_numeric(raw[column], errors='coerce').to_numpy(dtype=numpy.float64)
        bad = ~numpy.isfinite(values)
        if not need_targets:
            bad &= text != ''
        if bad.any():
            first = bad.argmax()
            raise DataError('%s: target %s is %r, expected a finite number (%d such rows)' % (
                frame['where'][first], column, text[first], bad.sum()))
        frame[target] = values
    return frame


def read_qm9(data, targets, need_targets=True):
    """Read the table that `--data` names.

    Args:
        data (str): 'sample', 'full' or the path of a CSV file with a column `smiles` and one for
            each target.
        targets (list of str): names of targets.
        need_targets (bool): if not, a file of the user's own may lack them.

    Returns:
        tuple: (description (str), table as of :func:`read_csv`).
    """
    same = {name: name for name in targets}
    if data == 'sample':
        return 'the sample of QM9 in this repository', read_csv(SAMPLE, 'smiles', same)
    if data != 'full':
        return data, read_csv(data, 'smiles', same, need_targets)
    paths = qm9pack_files()
    if paths:
        columns = {name: TARGETS[name][1] for name in targets}
        tables = [read_csv(path, 'SMILES', columns) for path in paths]
        return "QM9 from qm9pack's files", pandas.concat(tables, ignore_index=True)
    from chainer_chemistry.datasets import get_qm9_filepath
    print("qm9pack is not installed: using upstream's download of QM9 (once, about 90 MB) ...")
    try:
        path = get_qm9_filepath()
    except (OSError, tarfile.TarError) as error:
        raise DataError('the download of QM9 failed (%s); `pip install qm9pack` brings '
                        'the data, too' % error) from error
    return "QM9 from upstream's download, %s" % path, read_csv(path, 'SMILES1', same)


def thin_out(table, num_data):
    """Return `num_data` rows spread evenly over the table; -1 means all of them.

    QM9 is sorted by size, so that its first rows would be its smallest molecules only.
    """
    if num_data < 0 or num_data >= len(table):
        return table
    return table.iloc[numpy.arange(num_data) * len(table) // num_data].reset_index(drop=True)


def graph_of(smiles, preprocessor):
    """Return (arrays of one molecule, None), or (None, the reason why it has none)."""
    mol = Chem.MolFromSmiles(smiles)
    if mol is None:
        return None, 'RDKit cannot parse it'
    if mol.GetNumAtoms() == 0:
        return None, 'no atoms'
    largest = max(atom.GetAtomicNum() for atom in mol.GetAtoms())
    if largest >= MAX_ATOMIC_NUM:
        return None, 'atomic number %d, the models know those below %d' % (largest, MAX_ATOMIC_NUM)
    try:
        # Upstream's preprocessors take the molecule of the canonical SMILES.
        _, mol = preprocessor.prepare_smiles_and_mol(mol)
        return preprocessor.get_input_features(mol), None
    except (MolFeatureExtractionError, ValueError, KeyError, RuntimeError) as error:
        return None, '%s: %s' % (type(error).__name__, error)


def preprocess(table, method, targets):
    """Turn a table of SMILES into upstream's data set for a method.

    Args:
        table (pandas.DataFrame): as of :func:`read_csv`.
        method (str): a key of upstream's `preprocess_method_dict`.
        targets (list of str): the columns that become labels.

    Returns:
        tuple: (NumpyTupleDataset of (atoms (n,) int32, adj (n, n) float32, labels (T,) float32),
        the rows of the table it holds (list of int), failures: list of (where, SMILES, reason)).

    Raises:
        DataError: no molecule is left.
    """
    preprocessor = preprocess_method_dict[method]()
    examples, kept, failures = [], [], []
    # disable=None: a progress bar on a terminal, none in a file or pipe.
    rows = tqdm(zip(table['where'], table['smiles']), total=len(table), desc='preprocessing',
                leave=False, disable=None)
    with rdBase.BlockLogs():  # the reasons are listed instead
        for i, (where, smiles) in enumerate(rows):
            features, reason = graph_of(smiles, preprocessor)
            if features is None:
                failures.append((where, smiles, reason))
            else:
                examples.append(features)
                kept.append(i)
    if not examples:
        raise DataError('none of the %d molecules can be used%s' % (
            len(table), ', the first: %s: %r: %s' % failures[0] if failures else ''))
    columns = []
    for values in zip(*examples):
        # Filled like this, because asarray would stack molecules that happen to have one size.
        column = numpy.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            column[i] = value
        columns.append(column)
    labels = table[targets].to_numpy(dtype=numpy.float32)[kept]
    return NumpyTupleDataset(*columns, labels), kept, failures


def report_failures(failures, out, shown=10):
    """Say how many molecules were left out, and list all of them in OUT/failed.csv."""
    path = os.path.join(out, 'failed.csv')
    if os.path.exists(path):
        os.remove(path)  # of an earlier run
    if not failures:
        return
    pandas.DataFrame(failures, columns=['row', 'smiles', 'reason']).to_csv(path, index=False)
    print('%d molecule(s) could not be used, all listed in %s' % (len(failures), path))
    for failure in failures[:shown]:
        print('  %s: %r: %s' % failure)
    if 0 < shown < len(failures):
        print('  ... and %d more' % (len(failures) - shown))


def load_qm9(data, label, method, num_data, out, need_targets=True):
    """Read and preprocess the data of a run, and say what they are.

    Returns:
        tuple: (data set, the table (DataFrame), the rows of the table that the data set holds).
    """
    targets = target_names(label)
    description, table = read_qm9(data, targets, need_targets)
    n_rows = len(table)
    table = thin_out(table, num_data)
    dataset, kept, failures = preprocess(table, method, targets)
    print('Data: %s: %d molecules%s' % (
        description, n_rows, '' if len(kept) == n_rows else ', %d of them used' % len(kept)))
    print('%s: %s' % ('Target' if len(targets) == 1 else 'Targets',
                      ', '.join('%s (%s)' % (name, unit(name)) for name in targets)))
    report_failures(failures, out)
    return dataset, table, kept


def split_indices(n, train_data_ratio, seed):
    """Split range(n) by chance into training, validation and test part.

    Args:
        n (int): number of molecules.
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
        raise DataError('%d molecules with --train-data-ratio %g leave a part of the split empty; '
                        'expected at least one molecule each for training, validation and test'
                        % (n, train_data_ratio))
    return numpy.split(order, [n_train, n_train + n_valid])
