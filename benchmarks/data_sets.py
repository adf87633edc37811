"""Data sets of molecules for the benchmarks: samples of QM9 and NCI, Tox21 read or generated."""

import os

import chainer_bspmm  # noqa: F401  first: lets Chainer import on today's Python and NumPy
from chainer_chemistry.datasets import NumpyTupleDataset
import numpy
import pandas
from rdkit import rdBase, RDConfig

from benchmarks.harness import ROOT
from chainer_bspmm.dataset import from_smiles

QM9_SAMPLE = ROOT / 'examples' / 'qm9' / 'data' / 'qm9_sample.csv.gz'

# Atoms of Tox21's 8,006 molecules, as RDKit reads them: median, 99th percentile and maximum.
TOX21_MEDIAN, TOX21_P99, TOX21_LARGEST = 16, 62, 132
TOX21_SIZE, TOX21_TASKS = 8006, 12

# Pieces of SMILES that form a molecule in any order, and their numbers of atoms.
PIECES = (
    ('C', 1),
    ('N', 1),
    ('O', 1),
    ('C(=O)', 2),
    ('C(C)', 2),
    ('C(Cl)', 2),
    ('C=C', 2),
    ('c1ccc(cc1)', 6),
)


def tox21(path=None, limit=None):
    """Return SMILES (list), labels (M, 12) int32 with -1 for missing ones, and a description.

    `path`: MoleculeNet's CSV file. None generates molecules of Tox21's sizes, each a long chain,
    with random labels.
    """
    rng = numpy.random.RandomState(0)
    if path is None:
        n = min(limit or TOX21_SIZE, TOX21_SIZE)
        # Sizes are log-normal, with Tox21's median and 99th percentile (2.326 standard deviations).
        sizes = TOX21_MEDIAN * numpy.exp(
            rng.normal(0, numpy.log(TOX21_P99 / TOX21_MEDIAN) / 2.326, n)
        )
        smiles = [chain(rng, size) for size in sizes.clip(1, TOX21_LARGEST).astype(int)]
        labels = rng.choice([-1, 0, 1], (n, TOX21_TASKS), p=[0.2, 0.74, 0.06])
        return smiles, labels.astype('i'), "generated, of Tox21's sizes"
    frame = limited(pandas.read_csv(path), limit)
    return (
        frame['smiles'].tolist(),
        frame.select_dtypes('number').fillna(-1).to_numpy().astype('i'),
        'Tox21',
    )


def chain(rng, n_atoms):
    """Return the SMILES of a molecule with n_atoms atoms, a row of pieces."""
    parts = []
    while n_atoms:
        text, size = PIECES[rng.randint(len(PIECES))]
        if size <= n_atoms:
            parts.append(text)
            n_atoms -= size
    return ''.join(parts)


def qm9(limit=None):
    """Return SMILES (list), standardised targets (M, 15) float32 and a description, of a sample."""
    frame = limited(pandas.read_csv(QM9_SAMPLE), limit)
    targets = frame.drop(columns=['index', 'smiles']).to_numpy()
    targets = (targets - targets.mean(axis=0)) / targets.std(axis=0)
    return frame['smiles'].tolist(), targets.astype('f'), "QM9's sample in this repository"


def nci(limit=None):
    """Return SMILES (list), random targets (M, 1) float32 and a description, of NCI compounds."""
    path = os.path.join(RDConfig.RDDataDir, 'NCI', 'first_5K.smi')
    frame = limited(pandas.read_csv(path, sep=r'\s+', names=['smiles', 'id'], usecols=[0]), limit)
    targets = numpy.random.RandomState(0).normal(size=(len(frame), 1))
    return frame['smiles'].tolist(), targets.astype('f'), 'NCI compounds shipped with RDKit'


def limited(frame, limit):
    """Return `limit` random rows of a table; None means all."""
    return frame if limit is None or limit >= len(frame) else frame.sample(limit, random_state=0)


def of_smiles(smiles, labels, method):
    """Return Chainer Chemistry's data set for a method, and ours of the same molecules.

    This package reads both, because it is several times faster.
    """
    with rdBase.BlockLogs():
        sparse = from_smiles(smiles, method, labels).dataset
    return dense_of(sparse), sparse


def dense_of(sparse):
    """Convert a SparseDataset to Chainer Chemistry's data set of the same molecules."""
    matrices = [sparse[i][1].to_dense()[0] for i in range(len(sparse))]
    atoms, _, *labels = sparse.get_datasets()
    return NumpyTupleDataset(list(atoms), matrices, *labels)


def weisfeiler_lehman(dense, with_atom):
    """Return labels of all atoms, a list of (n,) int32, and the number of different labels.

    A label stands for the ids of the neighbours, and `with_atom` (``*_wle``) also of the atom.
    Labels are numbered from 0 as they appear. They equal the labels of Chainer Chemistry's
    ``apply_wle_for_datasets`` and ``apply_cwle_for_datasets`` with one iteration, which fail with
    today's NumPy.
    """
    numbers = {}
    found = []
    for atoms, matrix, *_ in dense:
        bonded = matrix if matrix.ndim == 2 else matrix.any(axis=0)
        labels = []
        for i, row in enumerate(bonded):
            neighbours = tuple(sorted(atoms[j] for j in row.nonzero()[0] if j != i))
            key = (atoms[i], neighbours) if with_atom else neighbours
            labels.append(numbers.setdefault(key, len(numbers)))
        found.append(numpy.array(labels, 'i'))
    return found, len(numbers)
