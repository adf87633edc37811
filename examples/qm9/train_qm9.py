#!/usr/bin/env python
"""Train a graph convolution network on QM9 with batched sparse products.

python train_qm9.py --label gap --epoch 50 --unit-num 64 --out result
python train_qm9.py --label gap --epoch 100 --unit-num 64 --out result --resume
"""

import importlib.util
import os
import sys
import tarfile

import pandas

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # for common

from common import arguments, training
from common.data import DataError, Rows, name_of, read_csv
from common.tasks import Regression
from chainer_chemistry.datasets import get_qm9_filepath

SAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', 'qm9_sample.csv.gz')

# Upstream's names of the 15 targets -> (unit, column in qm9pack's files, description).
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


def task_of(settings):
    """Return the task that `--label` stands for: one target, or all 15 of 'all'."""
    names = list(TARGETS) if settings['label'] == 'all' else [settings['label']]
    return Regression(names, {name: TARGETS[name][0] for name in names})


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


def renamed(rows, names):
    """Rename the columns of rows' table to ours, so that test.csv can be read like our sample."""
    return rows._replace(table=rows.table.rename(columns=names))


def read(data, settings, **options):
    """Return (description, rows) of `--data`: a word, or a file with the columns of the sample.

    `options`: see :func:`common.data.read_csv`.
    """
    task = task_of(settings)
    if data == 'sample':
        return 'the sample of QM9 in this repository', read_csv(SAMPLE, 'smiles', task, **options)
    if data != 'full':
        return name_of(data), read_csv(data, 'smiles', task, **options)
    paths = qm9pack_files()
    if paths:
        columns = [TARGETS[name][1] for name in task.names]
        parts = [read_csv(path, 'SMILES', task, columns, **options) for path in paths]
        return "QM9 from qm9pack's files", renamed(
            Rows(*map(pandas.concat, zip(*parts))),
            {'SMILES': 'smiles', **dict(zip(columns, task.names))},
        )
    print("qm9pack is not installed: using upstream's download of QM9 (once, about 90 MB) ...")
    try:
        path = get_qm9_filepath()
    except (OSError, tarfile.TarError) as error:
        raise DataError(
            'the download of QM9 failed (%s); `pip install qm9pack` brings the data, too' % error
        ) from error
    rows = read_csv(path, 'SMILES1', task, **options)
    return "QM9 from upstream's download, %s" % path, renamed(rows, {'SMILES1': 'smiles'})


def run(argv=None):
    """Train, test, and write the model; return the exit status."""
    parser = arguments.make_parser('Regression on QM9.')
    group = arguments.add_training_arguments(parser)
    group.add_argument(
        '--label',
        '-l',
        choices=list(TARGETS) + ['all'],
        default='all',
        help='target; all means all 15 at once',
    )
    group.add_argument(
        '--data',
        default='sample',
        help='sample: the 4,000 molecules in this repository; full: all of QM9 (pip install '
        'qm9pack, else a download); or a CSV file with the columns smiles and the target(s)',
    )
    parser.set_defaults(split='random')
    args = arguments.parse_training(parser, argv, sys.modules[__name__])
    title = 'all 15 targets'
    if args.label != 'all':
        title = '%s, %s' % (args.label, TARGETS[args.label][2])
    return training.train(sys.modules[__name__], args, 'QM9: ' + title)


if __name__ == '__main__':
    training.main(run)
