"""`from_smiles` gives the data set of upstream's parser, and a reason for each failure."""

import gzip
import inspect
import multiprocessing
import os
import re
import sys

import numpy
import pandas
import pytest

pytest.importorskip('rdkit')

from chainer.datasets import SubDataset  # NOQA: E402
from chainer_chemistry.dataset.parsers import SmilesParser  # NOQA: E402
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict  # NOQA: E402

from chainer_bspmm import concat_mols  # NOQA: E402
from chainer_bspmm.dataset import Failure, from_smiles  # NOQA: E402
from chainer_bspmm.dataset import smiles as smiles_module  # NOQA: E402
from chainer_bspmm.dataset import to_sparse, workers  # NOQA: E402
from tests.support import relative_error  # NOQA: E402
from tests.support.data_sets import assert_same_molecules  # NOQA: E402
from tests.support.processes import python, ROOT  # NOQA: E402

METHODS = (
    'nfp',
    'gin',
    'rsgcn',
    'ggnn',
    'relgcn',
    'relgat',
    'gnnfilm',
    'nfp_gwm',
    'gin_gwm',
    'rsgcn_gwm',
    'ggnn_gwm',
)

pytestmark = pytest.mark.filterwarnings('ignore:from_smiles: ')
SMILES = [
    'C',
    'CCO',
    'c1ccccc1',
    'CC#N',
    'C=C(C)C(=O)O',
    '[Na+].[Cl-]',
    'N.[Na]',
    '*C*',
    '[U]',
    'CN(C)(C)C',  # valence
    'C1CC',  # open ring
    '[NH3]->[Cu]',  # dative bond: has no relation
    '',
    'C1CC2C1CC2',
    'OCC(O)C(O)C(O)C(O)CO',
    'Clc1ccc(cc1)C(c1ccc(Cl)cc1)C(Cl)(Cl)Cl',
    'CC(C)(C)c1ccc(O)cc1',
    '[H][H]',
    'O=[N+]([O-])c1ccccc1',
    'F/C=C/F',
    'ClCBr',
    'c1cc[nH]c1',
    '[2H]C',
    'C1=CC=C[CH-]1.[Fe+2]',
    'N->[Pt](<-N)(Cl)Cl',
    'C[Mg]Br',
    'C$C',  # quadruple bond: has no relation
    'C~C',
    'CN(C)(C)->B',
    'CS(C)->O',
    'O<-S',
    'O<-C1CC1',
    'C#N->B(F)F',  # as many arrows as hydrogens
    'FB(F)<-OC(F)(F)F',
    'N~O',
    'CB(O)OI',
    'C' * 300,  # has more atoms than are read from one matrix
    '[NH4+].[O-]c1ccc[se]1',
]


def upstream(smiles, preprocessor):
    """Return upstream's result, with its data set converted to sparse form."""
    result = SmilesParser(preprocessor).parse(smiles, return_smiles=True, return_is_successful=True)
    result['dataset'] = to_sparse(result['dataset'])
    return result


def assert_same(actual, expected):
    """Check that the result of from_smiles is upstream's."""
    is_kept = expected['is_successful']
    numpy.testing.assert_array_equal(actual.kept, numpy.flatnonzero(is_kept))
    assert actual.smiles == list(expected['smiles'])
    positions = [failure.position for failure in actual.failures]
    numpy.testing.assert_array_equal(positions, numpy.flatnonzero(~is_kept))
    labels = assert_same_molecules(actual.dataset, expected['dataset'])
    for super_node, expected_super_node in labels:
        assert super_node.dtype == expected_super_node.dtype == numpy.float32
        assert relative_error(super_node, expected_super_node) < 1e-6


def fails(preprocessor, error, message, smiles=('C',), **options):
    """Check that from_smiles raises an error whose message is exactly this one."""
    with pytest.raises(error, match='^%s$' % re.escape(message)):
        from_smiles(smiles, preprocessor, **options)


@pytest.mark.parametrize('method', METHODS)
def test_equals_upstream(method):
    assert_same(from_smiles(SMILES, method), upstream(SMILES, preprocess_method_dict[method]()))


OPTIONS: list[dict] = [
    {'add_Hs': True},
    {'kekulize': True},
    {'max_atoms': 6},
    {'out_size': 9},
    {'max_atoms': 4, 'out_size': 6, 'add_Hs': True},
]


@pytest.mark.parametrize(
    'method, options',
    [
        (method, options)
        for method in METHODS
        for options in OPTIONS
        if set(options) <= set(inspect.signature(preprocess_method_dict[method]).parameters)
    ],
)
def test_options_of_the_preprocessor(method, options):
    cls = preprocess_method_dict[method]
    preprocessor = cls(**options)
    if 'out_size' in options and (method == 'gnnfilm' or method.endswith('_gwm')):
        message = (
            'preprocessor: expected out_size=-1, as %s fails for molecules that are padded, got %d'
        )
        fails(preprocessor, ValueError, message % (cls.__name__, options['out_size']))
    else:
        assert_same(from_smiles(SMILES, preprocessor), upstream(SMILES, preprocessor))


@pytest.mark.parametrize('n_processes', [1, 2])
def test_sample_of_qm9_in_processes(monkeypatch, n_processes):
    with gzip.open(ROOT / 'examples' / 'qm9' / 'data' / 'qm9_sample.csv.gz', 'rt') as file:
        header, *lines = [line.rstrip('\n').split(',') for line in file]
    smiles = [line[header.index('smiles')] for line in lines[:300]] + SMILES
    monkeypatch.setattr(smiles_module, 'CHUNK', 90)
    expected = upstream(smiles, preprocess_method_dict['rsgcn']())
    assert_same(from_smiles(smiles, 'rsgcn', n_processes=n_processes), expected)


def test_no_more_processes_than_chunks(monkeypatch):
    started = []

    class Pool(smiles_module.Workers):
        def __init__(self, function, n_processes):
            started.append(n_processes)
            super().__init__(function, 1)

    monkeypatch.setattr(smiles_module, 'Workers', Pool)
    monkeypatch.setattr(smiles_module, '_n_cpus', lambda: 64)
    from_smiles(['C'] * 1001, 'nfp')
    preprocessor = smiles_module.preprocessor_of('method', 'nfp')
    assert len(list(smiles_module.parse(iter('C' for _ in range(1001)), preprocessor))) == 5
    assert started == [5, 64]


needs_fork = pytest.mark.skipif(not workers.CAN_FORK, reason='processes are not forked here')


@pytest.fixture
def nitrogen_kills(monkeypatch):
    """Make a process die that parses a SMILES with an N."""
    graph = smiles_module._graph
    monkeypatch.setattr(
        smiles_module,
        '_graph',
        lambda smiles, *args: os._exit(1) if 'N' in smiles else graph(smiles, *args),
    )


DIED = 'the process that parsed it died: exit status 1'


@needs_fork
def test_molecules_that_end_their_process_are_failures(nitrogen_kills):
    smiles = ['C'] * 3000
    for position in (0, 1, 1700, 2999):
        smiles[position] = 'N'
    smiles[2] = 'C1'
    result = from_smiles(smiles, 'nfp', labels=numpy.arange(3000), n_processes=2)
    assert result.failures == [
        Failure(0, 'N', DIED),
        Failure(1, 'N', DIED),
        Failure(2, 'C1', 'RDKit cannot parse it'),
        Failure(1700, 'N', DIED),
        Failure(2999, 'N', DIED),
    ]
    assert result.kept.tolist() == [i for i in range(3000) if smiles[i] == 'C']
    numpy.testing.assert_array_equal(result.dataset.molecules.labels[0], result.kept)


@needs_fork
def test_the_calling_process_parses_no_long_smiles(nitrogen_kills, monkeypatch):
    long = 50
    monkeypatch.setattr(smiles_module, 'LONGEST_HERE', long)
    smiles = ['C', 'C' * long, 'C' * (long + 1), 'CN' * long, 'O']
    result = from_smiles(smiles, 'nfp', n_processes=1)
    assert result.failures == [Failure(3, 'CN' * long, DIED)]
    assert result.dataset.molecules.sizes.tolist() == [1, long, long + 1, 1]


def test_long_smiles_without_processes(monkeypatch):
    monkeypatch.setattr(workers, 'CAN_FORK', False)
    smiles = ['C', 'C' * 2001, 'O']
    result = from_smiles(smiles, 'nfp', n_processes=2)
    reason = (
        'it has 2001 characters, which may crash RDKit, and no process can be started to parse it: '
        'processes cannot be forked on %s' % sys.platform
    )
    assert result.failures == [Failure(1, smiles[1], reason)]
    assert result.smiles == ['C', 'O']


def test_in_this_process_where_none_can_be_started(monkeypatch):
    expected = from_smiles(SMILES * 40, 'rsgcn', n_processes=1)

    def refuse():
        raise BlockingIOError(11, 'Resource temporarily unavailable')

    monkeypatch.setattr(os, 'fork', refuse)
    result = from_smiles(SMILES * 40, 'rsgcn', n_processes=2)
    assert result.smiles == expected.smiles and result.failures == expected.failures
    assert_same_molecules(result.dataset, expected.dataset)


def test_semaphores_are_not_needed(monkeypatch):
    """Platforms without semaphores cannot import multiprocessing.synchronize."""
    monkeypatch.setitem(sys.modules, 'multiprocessing.synchronize', None)
    assert len(from_smiles(['C'] * 600, 'nfp', n_processes=2).dataset) == 600


def count_molecules(n):
    return len(from_smiles(['C'] * n, 'nfp', n_processes=2).dataset)


@needs_fork
def test_in_a_process_that_may_have_no_children():
    with multiprocessing.get_context('fork').Pool(1) as pool:
        assert pool.apply(count_molecules, (600,)) == 600


FLAT = """
import multiprocessing
multiprocessing.set_start_method('{}')
print('once')
from chainer_bspmm.dataset import from_smiles
print(len(from_smiles(['C'] * 600, 'nfp', n_processes=2).dataset))
"""


@pytest.mark.parametrize('method', ['fork', 'forkserver', 'spawn'])
def test_a_script_without_a_main_guard(tmp_path, method):
    (tmp_path / 'flat.py').write_text(FLAT.format(method))
    assert python('flat.py', cwd=tmp_path).stdout == 'once\n600\n'


CRASH = """
import resource
# As on a system whose stacks are small.
resource.setrlimit(resource.RLIMIT_STACK, (2**20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
from chainer_bspmm.dataset import from_smiles
for n_processes in (1, 2):
    smiles = ['CCO'] * 600
    smiles[300] = 'C' * 6000
    result = from_smiles(smiles, 'rsgcn', n_processes=n_processes)
    ((position, _, reason),) = result.failures
    print(len(result.dataset), position, reason)
"""


@pytest.mark.slow
@needs_fork
def test_a_molecule_of_which_rdkit_crashes():
    done = python('-W', 'ignore', '-c', CRASH)
    assert done.stdout == '599 300 the process that parsed it died: Segmentation fault\n' * 2
    assert done.stderr == ''


@needs_fork
def test_a_crash_is_not_kept_on_disk(nitrogen_kills, monkeypatch, tmp_path):
    """A crash may not happen again, for example if memory was short."""
    monkeypatch.setenv('CHAINER_BSPMM_CACHE_DIR', str(tmp_path))
    from_smiles(['C'] * 300 + ['N'], 'nfp', n_processes=2, cache=True)
    assert not list(tmp_path.iterdir())


def test_labels_follow_the_molecules():
    labels = numpy.arange(2 * len(SMILES)).reshape(-1, 2).astype('f')
    result = from_smiles(SMILES, 'relgcn', labels)
    batch = concat_mols(result.dataset)
    numpy.testing.assert_array_equal(batch[2], labels[result.kept])


def test_labels_follow_super_nodes():
    labels = numpy.arange(2 * len(SMILES)).reshape(-1, 2).tolist()
    result = from_smiles(SMILES, 'ggnn_gwm', labels)
    super_nodes, columns = concat_mols(result.dataset)[2:]
    assert super_nodes.ndim == 2
    numpy.testing.assert_array_equal(columns, numpy.array(labels)[result.kept])


@pytest.mark.parametrize('kind', ['without a masked value', 'of another machine'])
def test_labels_are_plain_arrays(kind):
    """As in a dense data set, the order of bytes is the machine's."""
    values = numpy.arange(len(SMILES), dtype='f')
    swapped = values.astype(values.dtype.newbyteorder())
    labels = swapped if kind == 'of another machine' else numpy.ma.masked_equal(values, -1)
    result = from_smiles(SMILES, 'rsgcn', labels)
    (found,) = result.dataset.molecules.labels
    assert type(found) is numpy.ndarray and found.dtype == values.dtype
    numpy.testing.assert_array_equal(found, values[result.kept])


@pytest.mark.parametrize('kind', [numpy.ma.MaskedArray, list])
def test_masked_labels(kind):
    labels = numpy.ma.masked_equal(numpy.arange(2 * len(SMILES), dtype='f').reshape(-1, 2), 3)
    message = (
        'labels: expected a value for each molecule, got masked ones; labels.filled(...) replaces '
        'them'
    )
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        from_smiles(SMILES, 'rsgcn', kind(labels))


def test_an_error_of_a_generator_is_not_hidden():
    def broken():
        yield 'CCO'
        raise TypeError('of the user')

    with pytest.raises(TypeError, match='^of the user$'):
        from_smiles(broken(), 'rsgcn')


def test_smiles_may_be_a_data_set_of_chainer():
    smiles = SubDataset(SMILES, 0, len(SMILES))
    assert from_smiles(smiles, 'rsgcn').smiles == from_smiles(SMILES, 'rsgcn').smiles


@pytest.mark.parametrize('smiles', ['CCO a\0b', 'CCO\t\0', 'CCO \xe4'])
def test_a_name_after_a_smiles_may_have_any_character(smiles):
    assert from_smiles([smiles], 'rsgcn').smiles == ['CCO']


def test_labels_of_a_table_with_columns_of_several_types():
    table = pandas.DataFrame({'active': [True, False], 'y': [1.5, 2.0]})
    result = from_smiles(['C', 'N'], 'rsgcn', table)
    numpy.testing.assert_array_equal(concat_mols(result.dataset)[2], [[1, 1.5], [0, 2]])


def test_no_smiles_at_all():
    with pytest.raises(TypeError, match='^smiles: expected a sequence of SMILES, got NoneType$'):
        from_smiles(None, 'rsgcn')


@pytest.mark.parametrize('kind', [pandas.DataFrame, pandas.Series])
def test_labels_of_pandas_are_taken_by_position(kind):
    """The index of a pandas object may be in another order than its rows."""
    labels = numpy.arange(len(SMILES)).astype('f')
    table = kind(labels, numpy.random.RandomState(0).permutation(len(SMILES)))
    result = from_smiles(SMILES, 'relgcn', table)
    expected = table.to_numpy()[result.kept]
    numpy.testing.assert_array_equal(result.dataset.molecules.labels[0], expected)


def test_failures_say_why(capfd):
    smiles = [
        'C',
        'CN(C)(C)C',
        'C1CC',
        '[NH3]->[Cu]',
        'CCCC',
        None,
        'c1cccc1',
        'C\ufffdC',
        '\xa0\xe4',
        '\ufeffCO',
        'CC\0OO',
        'C\xa0CO',
    ]
    result = from_smiles(smiles, preprocess_method_dict['relgcn'](max_atoms=3))
    assert result.kept.tolist() == [0] and result.kept.dtype.kind == 'i'
    assert [failure[:2] for failure in result.failures] == list(enumerate(smiles))[1:]
    assert all(isinstance(failure, Failure) for failure in result.failures)
    reasons = [failure.reason for failure in result.failures]
    assert 'valence for atom # 1 N, 4' in reasons[0]
    assert reasons[1] == 'RDKit cannot parse it'
    assert reasons[2] == 'bond type DATIVE, expected one of SINGLE, DOUBLE, TRIPLE, AROMATIC'
    assert 'exceeds num_max_atoms 3' in reasons[3]
    assert reasons[4] == 'expected a string, got NoneType'
    assert 'kekulize' in reasons[5]
    assert reasons[6:9] == ['it has a character that is not ASCII'] * 3
    assert reasons[9] == 'it has a NUL character'
    assert reasons[10] == 'it has a character that is not ASCII'
    assert capfd.readouterr() == ('', '')


class MolFeatureExtractionError(Exception):
    """Upstream's error has this name."""


@pytest.mark.parametrize(
    'error, reason',
    [
        (ValueError(' too many '), 'too many'),
        (MolFeatureExtractionError('too many'), 'too many'),
        (KeyError('N'), "KeyError: 'N'"),
        (IndexError('no atom'), 'IndexError: no atom'),
    ],
    ids=repr,
)
def test_unexpected_errors_have_their_kind(monkeypatch, error, reason):
    def refuse(*_):
        raise error

    monkeypatch.setattr(smiles_module, '_graph', refuse)
    preprocessor = smiles_module.preprocessor_of('method', 'nfp')
    _, _, _, (failure,) = smiles_module._chunk(preprocessor, True, (3, ['N']))
    assert failure == Failure(3, 'N', reason)


def test_a_smiles_has_one_line():
    """A name or a line break may follow the SMILES, but no other line."""
    smiles = ['CCO\nCCN', 'CCO\rCCN', 'CCO name\r\nCCN', 'CCO', 'CCO name', 'CCO\tname', 'CCO\r\n']
    result = from_smiles(smiles, 'relgcn')
    assert result.kept.tolist() == [3, 4, 5, 6]
    reasons = [failure.reason for failure in result.failures]
    assert reasons == ['it has several lines, expected one SMILES'] * 3


def warning_of(smiles, **options):
    with pytest.warns(UserWarning) as caught:
        from_smiles(smiles, 'relgcn', **options)
    (warning,) = caught
    assert warning.filename == __file__
    return str(warning.message)


def test_molecules_that_cannot_be_used_are_counted():
    """One warning counts them and names the first, behind which examples have moved up."""
    assert warning_of(['CCO', 'C(C', 'CCCCCC', 'C1CC']) == (
        'from_smiles: 2 of 4 SMILES cannot be used and have no example in the data set. The first, '
        "at position 1, is 'C(C': RDKit cannot parse it. `kept` has the positions of the examples, "
        '`failures` the reasons'
    )


def test_a_molecule_that_cannot_be_used():
    """The warning cuts a long SMILES."""
    assert warning_of(['CCO', 'C(' * 1000]) == (
        'from_smiles: 1 of 2 SMILES cannot be used and has no example in the data set. The first, '
        "at position 1, is '%sC: RDKit cannot parse it. `kept` has the positions of the examples, "
        '`failures` the reasons' % ('C(' * 49)
    )


def test_molecules_of_the_cache_are_counted_too(monkeypatch, tmp_path):
    monkeypatch.setenv('CHAINER_BSPMM_CACHE_DIR', str(tmp_path))
    smiles = ['CCO', None]
    assert warning_of(smiles, cache=True) == warning_of(smiles, cache=True) == warning_of(smiles)


def test_no_warning_where_all_can_be_used(recwarn):
    from_smiles(['CCO', 'C'], 'relgcn')
    assert not recwarn.list


def test_a_molecule_larger_than_out_size():
    preprocessor = preprocess_method_dict['nfp'](out_size=2)
    (failure,) = from_smiles(['C', 'CCC'], preprocessor).failures
    assert failure == Failure(1, 'CCC', '3 atoms, out_size is 2')


@pytest.mark.parametrize(
    'smiles, reason',
    [('', 'no atoms'), ('[Og]', 'atomic number 118, a super node counts those up to 117')],
)
def test_a_molecule_without_a_super_node(smiles, reason):
    assert from_smiles(['C', smiles], 'nfp_gwm').failures == [Failure(1, smiles, reason)]


def test_a_name_of_no_method():
    """The error suggests only methods whose molecules from_smiles can read."""
    fails(
        'gcn',
        ValueError,
        "preprocessor: expected one of 'nfp', 'nfp_gwm', 'ggnn', 'ggnn_gwm', 'gin', 'gin_gwm', "
        "'relgcn', 'rsgcn', 'rsgcn_gwm', 'relgat', 'gnnfilm', 'mpnn', got 'gcn'",
    )


def test_one_string_is_no_list_of_smiles():
    message = "smiles: expected a sequence of SMILES, got one: 'CCO'"
    fails('nfp', TypeError, message, smiles='CCO')


OTHER_PREPROCESSOR = (
    "preprocessor: expected one of Chainer Chemistry's NFPPreprocessor, GINPreprocessor, "
    'RSGCNPreprocessor, GGNNPreprocessor, RelGCNPreprocessor, RelGATPreprocessor, '
    'GNNFiLMPreprocessor, NFPGWMPreprocessor, GINGWMPreprocessor, RSGCNGWMPreprocessor, '
    'GGNNGWMPreprocessor, got %s; if another one makes adjacency matrices, parse with it, then '
    'use to_sparse. Those of SchNet, WeaveNet, MEGNet and CGCNN make none; these models run '
    'unswapped'
)


@pytest.mark.parametrize('method', ['schnet', 'gin_sparse', 'relgcn_sparse'])
def test_methods_whose_molecules_are_not_read(method):
    name = preprocess_method_dict[method].__name__
    fails(method, TypeError, OTHER_PREPROCESSOR % name)


def test_a_subclass_of_upstreams_preprocessor():
    own = type('NFPPreprocessor', (preprocess_method_dict['nfp'],), {'__module__': 'own'})
    fails(own(), TypeError, OTHER_PREPROCESSOR % 'NFPPreprocessor')


@pytest.mark.parametrize('labels, n', [([1, 2], 2), (1.0, 1)], ids=str)
def test_as_many_labels_as_smiles(labels, n):
    message = 'labels: expected one for each of the 38 SMILES, got %d' % n
    fails('nfp', ValueError, message, smiles=SMILES, labels=labels)


def test_no_molecule_can_be_used():
    message = (
        'smiles: expected at least one molecule that can be used, got 2, '
        "the first: 'C1': RDKit cannot parse it"
    )
    fails('nfp', ValueError, message, smiles=['C1', 'C2'])


def test_no_smiles():
    message = 'smiles: expected at least one molecule that can be used, got 0'
    fails('nfp', ValueError, message, smiles=[])


def test_no_process():
    fails('nfp', ValueError, 'n_processes: expected at least 1, got 0', n_processes=0)
