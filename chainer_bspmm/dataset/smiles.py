"""`from_smiles`: from SMILES to a sparse data set, in several processes, without dense matrices."""

import collections
import collections.abc
import contextlib
import functools
import itertools
import operator
import os
import re
import string
import sys
from typing import Any

import numpy

from chainer_chemistry.config import MAX_ATOMIC_NUM

from chainer_bspmm.compat.user_code import warn
from chainer_bspmm.dataset import cache as cache_files
from chainer_bspmm.dataset.labels import labels_of
from chainer_bspmm.dataset.molecules import Molecules
from chainer_bspmm.dataset.progress import progress
from chainer_bspmm.dataset.sparse_dataset import SparseDataset
from chainer_bspmm.dataset.workers import CannotStart, Died, Process, Workers
from chainer_bspmm.sparse import check

CHUNK = 250  # molecules of one task
LEAST_PARALLEL = 1000  # below this, starting processes takes longer than parsing
CHUNKS_AHEAD = 4  # chunks per process that may wait to be collected
# Characters of the longest SMILES that the calling process parses. RDKit recurses along a molecule:
# 20,000 atoms in a chain end a process with a stack of 8 MiB, 5,000 atoms one with 1 MiB.
LONGEST_HERE = 2000
DIED = 'the process that parsed it died: %s'
NOT_HERE = (
    'it has %d characters, which may crash RDKit, and no process can be started to parse it: %s'
)

# dataset; smiles (list of str): canonical, one for each example; kept (array): the position in the
# input of each; failures: list of Failure.
FromSmiles = collections.namedtuple('FromSmiles', 'dataset smiles kept failures')

Failure = collections.namedtuple('Failure', 'position smiles reason')


class _FailureHere(Failure):
    """Failure that may not happen on another machine or day, and so is not cached on disk."""

    __slots__ = ()


# The adjacency of a method. n_relations: 1 if bond types are not told apart; diagonal: whether it
# has one, as the last relation if there are several; normalized: whether it is D^-1/2 A D^-1/2, not
# A; super_node: whether molecules have one.
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

# RDKit's orders of the bonds that are relations 0 to 3.
BOND_TYPES = {'SINGLE': 1.0, 'DOUBLE': 2.0, 'TRIPLE': 3.0, 'AROMATIC': 1.5}
ORDERS = frozenset(BOND_TYPES.values())
RELATIONS = numpy.zeros(7, int)  # relation of a bond, indexed by twice its order
RELATIONS[[int(2 * order) for order in BOND_TYPES.values()]] = range(4)

# Characters of a SMILES without brackets, as RDKit writes it: for atoms, with their atomic numbers,
# where L and R stand for Cl and Br, and the others, which stand for no atom.
ATOMS = b'BCNOPSFIbcnops*LR'
SYMBOLS = bytes.maketrans(ATOMS, bytes([5, 6, 7, 8, 15, 16, 9, 53, 5, 6, 7, 8, 15, 16, 0, 17, 35]))
NO_SYMBOLS = b'()=#-:/\\.%0123456789$~<>'
# Between these elements RDKit makes only bonds of BOND_TYPES, unless a SMILES asks for others.
NON_METALS = bytes([0, 1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 33, 34, 35, 52, 53])
MOST_IN_MATRIX = 256  # atoms; for larger molecules a loop over the bonds is as fast


def _mol(smiles):
    """Return RDKit's molecule, or raise a ValueError with the reason why there is none."""
    from rdkit import Chem

    if not isinstance(smiles, str):
        raise ValueError('expected a string, got %s' % type(smiles).__name__)
    text = smiles.strip(string.whitespace)
    if '\n' in text or '\r' in text:
        # RDKit reads only the first line, without an error.
        raise ValueError('it has several lines, expected one SMILES')
    if '\0' in text or not text.isascii():
        # RDKit of 2022 reads only the part before such a character, without an error. In a name
        # after the SMILES any character is allowed.
        before_name = re.split('[ \t]', text, maxsplit=1)[0]
        if '\0' in before_name:
            raise ValueError('it has a NUL character')
        if not before_name.isascii():
            raise ValueError('it has a character that is not ASCII')
    mol = Chem.MolFromSmiles(smiles)
    if mol is None:
        raw = Chem.MolFromSmiles(smiles, sanitize=False)
        if raw is not None:
            Chem.SanitizeMol(raw)  # raises as in the call above, but with the reason
        raise ValueError('RDKit cannot parse it')
    return mol


def _atomic_numbers(canonical, mol):
    """Return a molecule's atomic numbers (bytes), from its SMILES if possible: RDKit is slower."""
    if '[' not in canonical:
        text = canonical.encode().replace(b'Cl', b'L').replace(b'Br', b'R')
        atoms = text.translate(None, NO_SYMBOLS)
        are_all = len(atoms) == mol.GetNumAtoms()  # hydrogens may have been added
        if are_all and not atoms.translate(None, ATOMS):
            return atoms.translate(SYMBOLS)
    return bytes([mol.GetAtomWithIdx(i).GetAtomicNum() for i in range(mol.GetNumAtoms())])


def _bonds(mol, n_relations, is_plain):
    """Return the entries of the adjacency, both directions of each bond, as two arrays."""
    # The arrays are places, ``row * n + column``, and orders of bonds, which are in ORDERS if they
    # matter (n_relations > 1). `is_plain`: the order of a bond determines its type.
    from rdkit.Chem import rdmolops

    n = mol.GetNumAtoms()
    if n <= MOST_IN_MATRIX and (n_relations == 1 or is_plain):
        # One call of RDKit for all bonds.
        matrix = rdmolops.GetAdjacencyMatrix(mol, useBO=n_relations > 1).ravel()
        (places,) = matrix.nonzero()
        if places.size == 2 * mol.GetNumBonds():
            orders = matrix.take(places)
            if n_relations == 1 or ORDERS.issuperset(orders.tolist()):
                return places, orders
    places, orders = [], []
    for i in range(mol.GetNumBonds()):  # faster than RDKit's iterator
        bond = mol.GetBondWithIdx(i)
        order = 1
        if n_relations > 1:
            name = bond.GetBondType().name
            if name not in BOND_TYPES:
                raise ValueError('bond type %s, expected one of %s' % (name, ', '.join(BOND_TYPES)))
            order = BOND_TYPES[name]
        begin, end = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        places += [begin * n + end, end * n + begin]
        orders += [order, order]
    return numpy.array(places, int), numpy.array(orders, float)


def _graph(smiles, preprocessor, kind, for_models):
    """Return canonical SMILES, atomic numbers (bytes), and the adjacency of :func:`_bonds`."""
    canonical, mol = preprocessor.prepare_smiles_and_mol(_mol(smiles))
    n = mol.GetNumAtoms()
    if 0 <= preprocessor.max_atoms < n:
        from chainer_chemistry.dataset.preprocessors.common import type_check_num_atoms

        type_check_num_atoms(mol, preprocessor.max_atoms)  # raises
    if 0 <= preprocessor.out_size < n:
        raise ValueError('%d atoms, out_size is %d' % (n, preprocessor.out_size))
    if not n and (kind.super_node or for_models):
        raise ValueError('no atoms')
    atoms = _atomic_numbers(canonical, mol)
    largest = max(atoms, default=0)
    numbers = largest, MAX_ATOMIC_NUM
    if for_models and largest >= MAX_ATOMIC_NUM:
        raise ValueError('atomic number %d, the models support those below %d' % numbers)
    if kind.super_node and largest > MAX_ATOMIC_NUM:
        raise ValueError('atomic number %d, a super node counts those up to %d' % numbers)
    # The order does not tell the type of a kekulized bond, which is still marked as aromatic. A
    # dative bond has an entry in one direction only.
    is_plain = not preprocessor.kekulize and not atoms.translate(None, NON_METALS)
    return (canonical, atoms, *_bonds(mol, kind.n_relations, is_plain))


def _molecules(graphs, preprocessor, kind):
    """Make `Molecules` from the results of :func:`_graph`."""
    _, texts, places, orders = zip(*graphs) if graphs else [()] * 4
    sizes = numpy.array(list(map(len, texts)), int)
    atoms = numpy.frombuffer(b''.join(texts), numpy.uint8).astype(numpy.int32)
    starts = numpy.cumsum(sizes) - sizes
    n_entries = list(map(len, places))
    row, column = numpy.divmod(
        numpy.concatenate([numpy.zeros(0, int), *places]), numpy.repeat(sizes, n_entries)
    )
    row += numpy.repeat(starts, n_entries)
    if kind.n_relations == 1:
        relation = numpy.zeros(row.size, int)
    else:
        relation = RELATIONS[(2 * numpy.concatenate([numpy.zeros(0), *orders])).astype(int)]
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
    molecules = Molecules(
        atoms=atoms,
        sizes=sizes,
        full_sizes=full_sizes,
        row_nnz=row_nnz,
        columns=columns,
        data=data,
        n_relations=kind.n_relations,
        labels=[],
    )
    if kind.super_node:
        molecules.labels.append(_super_nodes(molecules, relation, kind))
    return molecules


def _super_nodes(molecules, relation, kind):
    """Return the features of each molecule's super node, (M, F) float32.

    Size, sum of the adjacency; for each relation the largest value and its share of the sum; for
    each atomic number from 1 on, whether it occurs and its share of the atoms. As Chainer
    Chemistry's ``construct_supernode_feature``, but sums are taken in float64.
    """
    n = len(molecules)
    n_atoms = molecules.sizes
    n_relations = kind.n_relations
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


def _result(preprocessor, graphs, kept, failures):
    """Make an item of :func:`parse` from the results of :func:`_graph`."""
    molecules = _molecules(graphs, preprocessor, KINDS[type(preprocessor).__name__])
    canonical = '\n'.join([graph[0] for graph in graphs])
    return molecules, canonical, numpy.array(kept, numpy.int64), failures


def _chunk(preprocessor, for_models, first_and_smiles):
    """Parse a chunk of SMILES."""
    from rdkit import rdBase

    first, smiles = first_and_smiles
    kind = KINDS[type(preprocessor).__name__]
    graphs, kept, failures = [], [], []
    with rdBase.BlockLogs():  # `failures` has the reasons that RDKit would log
        for i, text in enumerate(smiles, first):
            try:
                graphs.append(_graph(text, preprocessor, kind, for_models))
                kept.append(i)
            except Exception as error:  # upstream's parsers skip a molecule for any error, too
                failures.append(Failure(i, text, _reason(error)))
    return _result(preprocessor, graphs, kept, failures)


def _reason(error):
    name = type(error).__name__
    text = str(error).strip()
    if isinstance(error, ValueError) or name == 'MolFeatureExtractionError':
        return text
    return '%s: %s' % (name, text)


def _n_cpus():
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def preprocessor_of(argument, method):
    """Return the preprocessor of a method, checked as in :func:`from_smiles`."""
    try:
        from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
    except ImportError as error:
        text = '%s: SMILES need RDKit: pip install rdkit (%s)'
        raise ImportError(text % (argument, error)) from error
    if isinstance(method, str):
        if method not in preprocess_method_dict:
            known = [key for key, kind in preprocess_method_dict.items() if kind.__name__ in KINDS]
            check.one_of(argument, method, known)
        method = preprocess_method_dict[method]()
    name = type(method).__name__
    if name not in KINDS or not type(method).__module__.startswith('chainer_chemistry.'):
        raise TypeError(
            "%s: expected one of Chainer Chemistry's %s, got %s; if another one makes adjacency "
            'matrices, parse with it, then use to_sparse. Those of SchNet, WeaveNet, MEGNet and '
            'CGCNN make none; these models run unswapped' % (argument, ', '.join(KINDS), name)
        )
    if method.out_size >= 0 and (KINDS[name].n_relations == 5 or KINDS[name].super_node):
        text = '%s: expected out_size=-1, as %s fails for molecules that are padded, got %d'
        raise ValueError(text % (argument, name, method.out_size))
    return method


def _failed(preprocessor, position, text, reason):
    """Make an item of :func:`parse` for a SMILES that no process has parsed."""
    return _result(preprocessor, [], [], [_FailureHere(position, text, reason)])


def _alone(preprocessor, task, first, smiles):
    """Parse SMILES one by one in a process that any of them may kill; yield the results."""
    process = None
    try:
        for position, text in enumerate(smiles, first):
            try:
                process = process or Process(task)
                result = process.ask((position, [text]))
            except Died as error:
                process = None
                result = _failed(preprocessor, position, text, DIED % error)
            except CannotStart as error:
                reason = NOT_HERE % (len(text), error)
                result = _failed(preprocessor, position, text, reason)
            yield result
    finally:
        if process is not None:
            process.close()


def _own_chunk(position_and_text):
    """Return the position of a long SMILES, which gets a separate chunk; None for a short one."""
    position, text = position_and_text
    return position if isinstance(text, str) and len(text) > LONGEST_HERE else None


def _chunks(smiles):
    """Yield chunks: (position of the first SMILES, tuple of SMILES, whether it is a long one)."""
    numbered = enumerate(smiles)
    while part := list(itertools.islice(numbered, CHUNK)):
        for long, group in itertools.groupby(part, _own_chunk):
            positions, texts = zip(*group)
            yield positions[0], texts, long is not None


def _answers(preprocessor, task, chunk, answer):
    """Yield the results of a chunk; parse its SMILES one by one if it has killed a process."""
    first, texts = chunk
    try:
        result = answer()
    except Died as error:
        if len(texts) > 1:
            yield from _alone(preprocessor, task, first, texts)
            return
        result = _failed(preprocessor, first, texts[0], DIED % error)
    yield result


def parse(smiles, preprocessor, n_processes=None, for_models=False):
    """Parse SMILES, an iterable that may be infinite; yield results chunk by chunk.

    A few chunks are read ahead. Where no process can be started, this one parses. A molecule that
    ends its process is a failure.
    `for_models`: also reject molecules that upstream's parsers keep but no model accepts, because
    they have no atoms or an element without an embedding. Each item is (Molecules; their canonical
    SMILES, joined by newlines; their positions in the input, (n,) int64; a list of Failure).
    Closing the generator ends the processes.
    """
    n_chunks = -(-operator.length_hint(smiles, sys.maxsize) // CHUNK)  # huge if it is not known
    smiles = iter(smiles)
    if n_processes is None:
        head = list(itertools.islice(smiles, LEAST_PARALLEL))
        n_processes = min(_n_cpus(), n_chunks) if len(head) == LEAST_PARALLEL else 1
        smiles = itertools.chain(head, smiles)
    task = functools.partial(_chunk, preprocessor, for_models)
    workers = None
    if n_processes > 1:
        with contextlib.suppress(CannotStart):
            workers = Workers(task, n_processes)
    if workers is None:
        for first, texts, is_long in _chunks(smiles):
            if is_long:
                yield from _alone(preprocessor, task, first, texts)
            else:
                yield task((first, texts))
        return
    with contextlib.closing(workers):
        waiting = collections.deque()
        for *chunk, _ in _chunks(smiles):
            waiting.append((chunk, functools.partial(workers.result, workers.submit(chunk))))
            if len(waiting) >= CHUNKS_AHEAD * n_processes:
                yield from _answers(preprocessor, task, *waiting.popleft())
        while waiting:
            yield from _answers(preprocessor, task, *waiting.popleft())


def _parse_all(smiles, preprocessor, n_processes):
    """Return Molecules, canonical SMILES, positions and failures of a list of SMILES."""
    parts, canonical, kept, failures = [], [], [], []
    with (
        contextlib.closing(parse(smiles, preprocessor, n_processes)) as chunks,
        progress(len(smiles), 'from_smiles') as advance,
    ):
        for part, texts, positions, new_failures in chunks:
            parts.append(part)
            canonical += texts.split('\n') if positions.size else []
            kept.append(positions)
            failures += new_failures
            advance(positions.size + len(new_failures))
    if not canonical:
        raise ValueError(
            'smiles: expected at least one molecule that can be used, got %d%s'
            % (len(smiles), ', the first: %.100r: %s' % failures[0][1:] if failures else '')
        )
    return Molecules.concatenate(parts), canonical, numpy.concatenate(kept), failures


def _warn_of(failures, n):
    position, text, reason = failures[0]
    warn(
        'from_smiles: %d of %d SMILES cannot be used and %s no example in the data set. The first, '
        'at position %d, is %.100r: %s. `kept` has the positions of the examples, `failures` the '
        'reasons'
        % (len(failures), n, 'has' if len(failures) == 1 else 'have', position, text, reason)
    )


def _has_mask(labels):
    """Return whether a value is masked in labels, an array or a sequence of values or arrays."""
    parts = labels if isinstance(labels, (list, tuple)) else [labels]
    return any(
        isinstance(part, numpy.ma.MaskedArray) and numpy.ma.is_masked(part) for part in parts
    )


def from_smiles(
    smiles: collections.abc.Iterable[str],
    preprocessor: Any,
    labels: Any = None,
    n_processes: int | None = None,
    cache: bool = False,
) -> FromSmiles:
    """Turn SMILES into a sparse data set, with a preprocessor of Chainer Chemistry.

    No dense data set is made. Molecules that cannot be used have no example: one warning counts
    them, and the result lists them with the reasons and has the positions of the others. Shows a
    progress bar on a terminal.

    Args:
        smiles (sequence of str): M molecules.
        preprocessor (MolPreprocessor or str): Chainer Chemistry's for NFP, GIN, RSGCN, GGNN,
            RelGCN, RelGAT, GNNFiLM or their GWM variants, with any options; or the name of a
            method, a key of ``preprocess_method_dict``.
        labels (array or None): (M, ...) labels, by position: also a Series or DataFrame; the rows
            of skipped molecules are skipped.
        n_processes (int or None): number of worker processes; None means one for each CPU if there
            are 1000 molecules or more, else none. 1 starts none, except for SMILES of more than
            2000 characters.
        cache (bool): whether to read the parsed molecules from a folder on disk, if they are there,
            and to store them there otherwise. They are identified by the SMILES, the preprocessor's
            class and options, and the versions of RDKit, Chainer Chemistry and this package. The
            folder is ``$CHAINER_BSPMM_CACHE_DIR``, or ``chainer_bspmm`` in ``$XDG_CACHE_HOME`` or
            ``~/.cache``. It keeps the most recently used files, up to 2 GiB, and may be deleted at
            any time.

    Returns:
        FromSmiles: ``dataset`` (SparseDataset), ``smiles`` (canonical, one for each example, for
        scaffold splitters), ``kept`` ((n,) int64, positions of the examples in the input), and
        ``failures``, a list of ``Failure(position, smiles, reason)``.

    Raises:
        ImportError: RDKit is not installed.
        TypeError: ``preprocessor`` is not one of these, or ``smiles`` is one str or no sequence.
        ValueError: no molecule can be used, ``labels`` has another length or masked values, or
            ``out_size`` is set where upstream's preprocessor fails with it.
        RuntimeError: a process died, and no other can be started.

    Note:
        Equals :func:`to_sparse` of upstream's data set; the float32 sums in RSGCN's super
        nodes differ by rounding.

        Processes are forked, whatever the start method of multiprocessing, so scripts need no
        ``if __name__ == '__main__':``. Where that is impossible (Windows, macOS, a limit of the
        system), the calling process parses.

        A molecule that ends the process that parses it, such as a chain of 20,000 atoms, is a
        failure like any other. The calling process parses no SMILES of more than 2000 characters:
        a process is started for them, and where none can be started they are failures. Should a
        shorter SMILES crash RDKit in the calling process, the program ends.
    """
    preprocessor = preprocessor_of('preprocessor', preprocessor)
    if isinstance(smiles, str):
        raise TypeError('smiles: expected a sequence of SMILES, got one: %r' % smiles)
    try:
        values = iter(smiles)  # data sets of Chainer, such as a SubDataset, have items only
    except TypeError:
        text = 'smiles: expected a sequence of SMILES, got %s'
        raise TypeError(text % type(smiles).__name__) from None
    smiles = list(values)
    if _has_mask(labels):
        raise ValueError(
            'labels: expected a value for each molecule, got masked ones; labels.filled(...) '
            'replaces them'
        )
    if labels is not None and not isinstance(labels, (list, tuple)):
        # pandas would not index them by position.
        labels = numpy.atleast_1d(numpy.asarray(labels))
        if labels.dtype == object and labels.ndim > 1:  # a DataFrame with columns of several types
            labels = numpy.array(labels.tolist())
    if labels is not None and len(labels) != len(smiles):
        text = 'labels: expected one for each of the %d SMILES, got %d'
        raise ValueError(text % (len(smiles), len(labels)))
    if n_processes is not None:
        n_processes = check.count('n_processes', n_processes, 1)
    file = cache_files.path_for(smiles, preprocessor) if cache else None
    parsed = None if file is None else cache_files.read(file)
    if parsed is None:
        parsed = _parse_all(smiles, preprocessor, n_processes)
        is_final = not any(isinstance(failure, _FailureHere) for failure in parsed[3])
        if file is not None and is_final:
            cache_files.write(file, *parsed)
    molecules, canonical, kept, failures = parsed
    if failures:
        _warn_of(failures, len(smiles))
    if isinstance(labels, numpy.ndarray) and labels.dtype.kind in 'biuf':
        molecules.labels.append(labels[kept].astype(labels.dtype.newbyteorder('='), copy=False))
    elif labels is not None:
        rows = [labels[i] for i in kept.tolist()]
        molecules.labels += labels_of([rows], 'labels', 0, may_be_names=False)
    return FromSmiles(
        SparseDataset(molecules), canonical, kept, [Failure(*failure) for failure in failures]
    )
