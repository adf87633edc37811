"""`from_smiles`: from SMILES to a sparse data set, in several processes, without dense matrices."""

import collections
import collections.abc
import concurrent.futures.process
import contextlib
import functools
import gc
import itertools
import os
from typing import Any

import numpy
from tqdm import tqdm

from chainer_bspmm.dataset import dense_examples
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.sparse import validate

CHUNK = 250  # molecules of one task
LEAST_PARALLEL = 1000  # below this, starting processes takes longer than parsing
CHUNKS_AHEAD = 4  # chunks per process that may wait to be collected

# dataset; smiles (list of str): canonical, one for each example; kept (array): the position in the
# input of each; failures: list of Failure.
FromSmiles = collections.namedtuple('FromSmiles', 'dataset smiles kept failures')

Failure = collections.namedtuple('Failure', 'position smiles reason')

# The adjacency of a method: n_relations bond types, or 1 for any bond; whether it has a diagonal
# (a separate relation if there are several); whether it is D^-1/2 A D^-1/2 or A; super node or not.
Kind = collections.namedtuple('Kind', 'n_relations diagonal normalized super_node')

KINDS = {
    'NFPPreprocessor': Kind(1, True, False, False),
    'GINPreprocessor': Kind(1, True, False, False),
    'RSGCNPreprocessor': Kind(1, True, True, False),
    'GGNNPreprocessor': Kind(4, False, False, False),
    'RelGCNPreprocessor': Kind(4, False, False, False),
    'RelGATPreprocessor': Kind(4, False, False, False),
    'GNNFiLMPreprocessor': Kind(5, True, False, False),
    'NFPGWMPreprocessor': Kind(1, True, False, True),
    'GINGWMPreprocessor': Kind(1, True, False, True),
    'RSGCNGWMPreprocessor': Kind(1, True, True, True),
    'GGNNGWMPreprocessor': Kind(4, False, False, True),
}

BOND_TYPES = ('SINGLE', 'DOUBLE', 'TRIPLE', 'AROMATIC')


def _mol(smiles):
    """Return RDKit's molecule, or raise a ValueError with the reason why it has none."""
    from rdkit import Chem

    if not isinstance(smiles, str):
        raise ValueError('expected a string, got %s' % type(smiles).__name__)
    if not (smiles.split() or [''])[0].isascii():  # a name may follow
        # RDKit of 2022 reads only the part before such a character, without an error.
        raise ValueError('RDKit cannot parse it')
    mol = Chem.MolFromSmiles(smiles)
    if mol is None:
        raw = Chem.MolFromSmiles(smiles, sanitize=False)
        if raw is None:
            raise ValueError('RDKit cannot parse it')
        Chem.SanitizeMol(raw)  # raises as in the call above, but with the reason
        raise ValueError('RDKit cannot parse it')
    return mol


def _graph(smiles, preprocessor, kind, for_models):
    """Return canonical SMILES, atomic numbers, and the two ends and the relation of every bond."""
    from chainer_chemistry.config import MAX_ATOMIC_NUM
    from chainer_chemistry.dataset.preprocessors.common import type_check_num_atoms

    canonical, mol = preprocessor.prepare_smiles_and_mol(_mol(smiles))
    type_check_num_atoms(mol, preprocessor.max_atoms)
    atoms = [mol.GetAtomWithIdx(i).GetAtomicNum() for i in range(mol.GetNumAtoms())]
    if 0 <= preprocessor.out_size < len(atoms):
        raise ValueError('%d atoms, out_size is %d' % (len(atoms), preprocessor.out_size))
    if not atoms and (kind.super_node or for_models):
        raise ValueError('no atoms')
    largest = max(atoms, default=0)
    if for_models and largest >= MAX_ATOMIC_NUM:
        raise ValueError(
            'atomic number %d, the models support those below %d' % (largest, MAX_ATOMIC_NUM)
        )
    if kind.super_node and largest > MAX_ATOMIC_NUM:
        raise ValueError(
            'atomic number %d, a super node counts those up to %d' % (largest, MAX_ATOMIC_NUM)
        )
    bonds = []
    for i in range(mol.GetNumBonds()):  # faster than iterating
        bond = mol.GetBondWithIdx(i)
        relation = 0
        if kind.n_relations > 1:
            name = bond.GetBondType().name
            if name not in BOND_TYPES:
                raise ValueError('bond type %s, expected one of %s' % (name, ', '.join(BOND_TYPES)))
            relation = BOND_TYPES.index(name)
        bonds.append((bond.GetBeginAtomIdx(), bond.GetEndAtomIdx(), relation))
    return canonical, atoms, bonds


def _molecules(graphs, preprocessor, kind):
    """Make `Molecules` of lists of atomic numbers and bonds."""
    sizes = numpy.array([len(atoms) for _, atoms, _ in graphs], int)
    atoms = numpy.array([atom for _, atoms, _ in graphs for atom in atoms], numpy.int32)
    bonds = numpy.array([bond for _, _, bonds in graphs for bond in bonds], int).reshape(-1, 3)
    starts = numpy.cumsum(sizes) - sizes
    shift = numpy.repeat(starts, [len(bonds) for _, _, bonds in graphs])
    row = numpy.concatenate([bonds[:, 0] + shift, bonds[:, 1] + shift])
    column = numpy.concatenate([bonds[:, 1], bonds[:, 0]])
    relation = numpy.tile(bonds[:, 2], 2)
    if kind.diagonal:
        row = numpy.concatenate([row, numpy.arange(atoms.size)])
        column = numpy.concatenate([column, numpy.arange(atoms.size) - numpy.repeat(starts, sizes)])
        relation = numpy.concatenate([relation, numpy.full(atoms.size, kind.n_relations - 1)])
    order = numpy.lexsort((column, relation, row))
    row, column, relation = row[order], column[order], relation[order]
    row_nnz = numpy.bincount(row, minlength=atoms.size).astype(numpy.int32)
    data = None
    if kind.normalized:
        scale = 1 / numpy.sqrt(row_nnz.astype('f'))  # in float32, as upstream
        data = scale[row] * scale[column + numpy.repeat(numpy.repeat(starts, sizes), row_nnz)]
    full_sizes = numpy.maximum(sizes, preprocessor.out_size)
    columns = (column * kind.n_relations + relation).astype(numpy.int32)
    molecules = Molecules(atoms, sizes, full_sizes, row_nnz, columns, data, kind.n_relations, [])
    if kind.super_node:
        molecules.labels.append(_super_nodes(molecules, relation, kind))
    return molecules


def _super_nodes(molecules, relation, kind):
    """Return the features of each molecule's super node, (M, F) float32.

    Sizes, sum of the adjacency; for each relation the largest value and its share of the sum; for
    each atomic number from 1 on, whether it occurs and its share of the atoms.

    Source: ``construct_supernode_feature`` of Chainer Chemistry, sums taken in float64.
    """
    from chainer_chemistry.config import MAX_ATOMIC_NUM

    n, n_atoms, n_relations = len(molecules), molecules.sizes, kind.n_relations
    place = numpy.repeat(numpy.arange(n), molecules.nnz) * n_relations + relation
    values = numpy.ones(place.size) if molecules.data is None else molecules.data
    sums = numpy.bincount(place, values, n * n_relations).reshape(n, n_relations)
    largest = numpy.zeros(n * n_relations)
    numpy.maximum.at(largest, place, values)
    total = sums.sum(axis=1)
    width = MAX_ATOMIC_NUM + 1
    counts = numpy.bincount(
        numpy.repeat(numpy.arange(n), n_atoms) * width + molecules.atoms, minlength=n * width
    ).reshape(n, width)[:, 1:]
    return numpy.concatenate(
        [
            n_atoms[:, None],
            total[:, None],
            largest.reshape(n, n_relations),
            sums / numpy.where(total, total, 1)[:, None],
            counts > 0,
            counts / n_atoms[:, None],
        ],
        axis=1,
    ).astype('f')


def _chunk(preprocessor, for_models, first_and_smiles):
    """Turn a chunk of SMILES into Molecules, canonical SMILES, positions, failures."""
    from rdkit import rdBase

    first, smiles = first_and_smiles
    kind = KINDS[type(preprocessor).__name__]
    graphs, kept, failures = [], [], []
    with rdBase.BlockLogs():  # the reasons are listed instead
        for i, text in enumerate(smiles, first):
            try:
                graphs.append(_graph(text, preprocessor, kind, for_models))
                kept.append(i)
            except Exception as error:  # upstream's parsers skip a molecule for any error, too
                failures.append(Failure(i, text, _reason(error)))
    return _molecules(graphs, preprocessor, kind), [graph[0] for graph in graphs], kept, failures


def _reason(error):
    name, text = type(error).__name__, str(error).strip()
    if isinstance(error, ValueError) or name == 'MolFeatureExtractionError':
        return text
    return '%s: %s' % (name, text)


def _n_cpus():
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def _chunks(smiles):
    """Yield (position of the first, list of SMILES)."""
    for first in itertools.count(0, CHUNK):
        chunk = list(itertools.islice(smiles, CHUNK))
        if not chunk:
            return
        yield first, chunk


def preprocessor_of(argument, method):
    """Return the preprocessor of a method, checked.

    Args:
        argument (str): its name in error messages.
        method (MolPreprocessor or str): as in :func:`from_smiles`.

    Raises:
        ImportError, TypeError, ValueError: as :func:`from_smiles`.
    """
    try:
        from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
    except ImportError as error:
        raise ImportError(
            '%s: SMILES need RDKit: pip install rdkit (%s)' % (argument, error)
        ) from error
    if isinstance(method, str):
        validate.one_of(argument, method, preprocess_method_dict)
        method = preprocess_method_dict[method]()
    name = type(method).__name__
    if name not in KINDS or not type(method).__module__.startswith('chainer_chemistry.'):
        raise TypeError(
            "%s: expected one of Chainer Chemistry's %s, got %s; for another one parse with it, "
            'then use to_sparse' % (argument, ', '.join(KINDS), name)
        )
    if method.out_size >= 0 and (KINDS[name].n_relations == 5 or KINDS[name].super_node):
        raise ValueError(
            '%s: expected out_size=-1, as %s fails for molecules that are padded, got '
            '%d' % (argument, name, method.out_size)
        )
    return method


def parse(smiles, preprocessor, n_processes=None, for_models=False):
    """Parse SMILES and yield the results chunk by chunk, in order, at most a few chunks ahead.

    Args:
        smiles (iterable of str): may be infinite.
        preprocessor (MolPreprocessor): of :func:`preprocessor_of`.
        n_processes (int or None): as in :func:`from_smiles`.
        for_models (bool): also reject molecules that upstream's parsers keep but no model accepts:
            those without atoms, or with elements that have no embedding.

    Returns:
        generator of tuple: Molecules, list of canonical SMILES, list of positions, list of Failure.

    Raises:
        RuntimeError: a process died, for example for lack of memory.

    Note:
        Closing the generator ends the processes.
    """
    smiles = iter(smiles)
    if n_processes is None:
        head = list(itertools.islice(smiles, LEAST_PARALLEL))
        n_processes = _n_cpus() if len(head) == LEAST_PARALLEL else 1
        smiles = itertools.chain(head, smiles)
    task, chunks = functools.partial(_chunk, preprocessor, for_models), _chunks(smiles)
    if n_processes == 1:
        yield from map(task, chunks)
        return
    # gc.freeze: forked processes must not collect this process's CUDA objects.
    pool = concurrent.futures.ProcessPoolExecutor(n_processes, initializer=gc.freeze)
    first = n_read = 0
    try:
        waiting = collections.deque()
        for chunk in chunks:
            waiting.append((chunk[0], pool.submit(task, chunk)))
            n_read = chunk[0] + len(chunk[1])
            if len(waiting) >= CHUNKS_AHEAD * n_processes:
                first, future = waiting.popleft()
                yield future.result()
        while waiting:
            first, future = waiting.popleft()
            yield future.result()
    except concurrent.futures.process.BrokenProcessPool as error:
        raise RuntimeError(
            'smiles: a process died while parsing those at positions %d to %d' % (first, n_read - 1)
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def from_smiles(
    smiles: collections.abc.Iterable[str],
    preprocessor: Any,
    labels: Any = None,
    n_processes: int | None = None,
) -> FromSmiles:
    """Turn SMILES into a sparse data set, as Chainer Chemistry's preprocessor into a dense one.

    No dense matrix is made. Molecules that cannot be used are skipped and listed with the reason.
    Shows a progress bar on a terminal.

    Args:
        smiles (sequence of str): M molecules.
        preprocessor (MolPreprocessor or str): Chainer Chemistry's for NFP, GIN, RSGCN, GGNN,
            RelGCN, RelGAT, GNNFiLM or their GWM variants, with any options; or the name of a
            method, a key of ``preprocess_method_dict``.
        labels (array or None): (M, ...) labels; the rows of skipped molecules are skipped.
        n_processes (int or None): worker processes; None means one for each CPU from 1000
            molecules on, else none. 1 starts none.

    Returns:
        FromSmiles: ``dataset`` (SparseDataset), ``smiles`` (canonical, one for each example, for
        scaffold splitters), ``kept`` ((n,) int64, positions of the examples in the input), and
        ``failures``, a list of ``Failure(position, smiles, reason)``.

    Raises:
        ImportError: RDKit is not installed.
        TypeError: another preprocessor.
        ValueError: no molecule can be used, ``labels`` has another length, or ``out_size`` is set
        where upstream's preprocessor fails with it.
        RuntimeError: a process died.

    Note:
        Equals :func:`to_sparse` of upstream's data set; the float32 sums in RSGCN's super
        nodes differ by rounding. Where processes are spawned (Windows, macOS) the calling script
        needs ``if __name__ == '__main__':``.
    """
    preprocessor = preprocessor_of('preprocessor', preprocessor)
    smiles = list(smiles)
    if labels is not None and len(labels) != len(smiles):
        raise ValueError(
            'labels: expected one for each of the %d SMILES, got %d' % (len(smiles), len(labels))
        )
    if n_processes is not None:
        n_processes = validate.count('n_processes', n_processes, 1)
    parts, canonical, kept, failures = [], [], [], []
    with (
        contextlib.closing(parse(smiles, preprocessor, n_processes)) as found,
        tqdm(total=len(smiles), desc='from_smiles', leave=False, disable=None) as bar,
    ):
        for part, *lists in found:
            parts.append(part)
            for whole, new in zip((canonical, kept, failures), lists):
                whole += new
            bar.update(len(lists[1]) + len(lists[2]))
    if not kept:
        raise ValueError(
            'smiles: expected at least one molecule that can be used, got %d%s'
            % (len(smiles), ', the first: %r: %s' % failures[0][1:] if failures else '')
        )
    molecules = Molecules.concatenate(parts)
    if labels is not None:
        molecules.labels.append(dense_examples.stack([labels[i] for i in kept], 'labels', 0))
    return FromSmiles(SparseDataset(molecules), canonical, numpy.array(kept), failures)
