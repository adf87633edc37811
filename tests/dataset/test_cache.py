"""Parsed SMILES on disk, which are found again only if they are the same, whole and readable."""

import errno
import multiprocessing
import os
import pathlib
import re
import time

import numpy
import pytest

pytest.importorskip('rdkit')

from chainer_chemistry.dataset.preprocessors import preprocess_method_dict  # NOQA: E402

import chainer_chemistry  # NOQA: E402
import rdkit  # NOQA: E402

from chainer_bspmm.dataset import cache, from_smiles  # NOQA: E402
from chainer_bspmm.dataset import smiles as smiles_module  # NOQA: E402
from tests.support.data_sets import assert_same_molecules  # NOQA: E402

pytestmark = pytest.mark.filterwarnings('ignore:from_smiles: ')
SMILES = ['C', 'CCO', 'C1CC', 'c1ccccc1', '', 'CN(C)(C)C', 'O=[N+]([O-])c1ccccc1', 'CC#N', '[U]']


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / 'cache'))
    return tmp_path / 'cache'


@pytest.fixture
def parsed(monkeypatch):
    """List with an item for each call of the parser."""
    parse = smiles_module.parse
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return parse(*args, **kwargs)

    monkeypatch.setattr(smiles_module, 'parse', counted)
    return calls


def assert_equal(actual, expected):
    """Check that two results of from_smiles have the same bits."""
    assert actual.smiles == expected.smiles
    assert actual.failures == expected.failures
    assert list(map(type, actual.failures)) == list(map(type, expected.failures))
    numpy.testing.assert_array_equal(actual.kept, expected.kept)
    for one, two in assert_same_molecules(actual.dataset, expected.dataset):
        numpy.testing.assert_array_equal(one, two)


@pytest.mark.parametrize('method', ['rsgcn', 'relgcn', 'ggnn_gwm'])
def test_found_again_whatever_the_labels(method, parsed):
    labels = numpy.arange(2 * len(SMILES)).reshape(-1, 2).astype('f')
    from_smiles(SMILES, method, labels, cache=True)
    for columns in (labels, labels + 1, labels.tolist(), None):
        expected = from_smiles(SMILES, method, columns)
        parsed.clear()
        assert_equal(from_smiles(SMILES, method, columns, cache=True), expected)
        assert not parsed


def test_nothing_is_written_unless_asked_for(folder):
    from_smiles(SMILES, 'nfp')
    assert not folder.exists()


def test_parsed_again_where_anything_differs(folder):
    cls = preprocess_method_dict['rsgcn']
    cases = [
        (SMILES, 'rsgcn'),
        ([*SMILES[:-1], 'CCCCN'], 'rsgcn'),
        (SMILES[::-1], 'rsgcn'),
        (SMILES[:-1], 'rsgcn'),
        (SMILES, 'nfp'),
        (SMILES, cls(add_Hs=True)),
        (SMILES, cls(max_atoms=5)),
        (['CC', 'C'], 'rsgcn'),
        (['C', 'CC'], 'rsgcn'),
    ]
    for n, (smiles, method) in enumerate(cases, 1):
        for _ in range(2):
            assert_equal(from_smiles(smiles, method, cache=True), from_smiles(smiles, method))
        assert len(list(folder.iterdir())) == n


def test_a_preprocessor_of_a_method_finds_what_its_name_has_left(parsed):
    from_smiles(SMILES, 'rsgcn', cache=True)
    parsed.clear()
    from_smiles(SMILES, preprocess_method_dict['rsgcn'](), cache=True)
    assert not parsed


@pytest.mark.parametrize(
    'owner, name',
    [(chainer_chemistry, '__version__'), (rdkit, '__version__'), (cache, '_own_version')],
    ids=['Chainer Chemistry', 'RDKit', 'this package'],
)
def test_parsed_again_with_another_version(parsed, monkeypatch, owner, name):
    from_smiles(SMILES, 'rsgcn', cache=True)
    parsed.clear()
    monkeypatch.setattr(owner, name, lambda: 'another')
    from_smiles(SMILES, 'rsgcn', cache=True)
    assert len(parsed) == 1


def _half(content):
    return content[: len(content) // 2]


def _flipped(content):
    """Return the content with one bit in the middle flipped."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    'damage',
    [_half, _flipped, lambda content: b'', lambda content: b'PK' + content],
    ids=['half', 'flipped', 'empty', 'longer'],
)
def test_damaged_file_is_made_again(damage, folder, parsed):
    expected = from_smiles(SMILES, 'relgcn', cache=True)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    parsed.clear()
    assert_equal(from_smiles(SMILES, 'relgcn', cache=True), expected)
    assert len(parsed) == 1
    assert_equal(from_smiles(SMILES, 'relgcn', cache=True), expected)
    assert len(parsed) == 1


def _write_often(n):
    for _ in range(n):
        for file in cache.directory().glob('*.npz'):
            file.unlink(missing_ok=True)
        from_smiles(SMILES, 'relgcn', cache=True)


@pytest.mark.skipif('fork' not in multiprocessing.get_all_start_methods(), reason='forks')
def test_several_processes_at_once(folder):
    expected = from_smiles(SMILES, 'relgcn', cache=True)
    context = multiprocessing.get_context('fork')
    others = [context.Process(target=_write_often, args=(10,)) for _ in range(2)]
    for other in others:
        other.start()
    latest = time.monotonic() + 120
    while any(other.is_alive() for other in others):
        assert time.monotonic() < latest
        assert_equal(from_smiles(SMILES, 'relgcn', cache=True), expected)
    assert [other.exitcode for other in others] == [0, 0]
    assert [file.suffix for file in folder.iterdir()] == ['.npz']


def cannot_write(folder, reason):
    """Return a pattern that matches the whole warning."""
    message = 'cache: cannot write to %s: %s; set CHAINER_BSPMM_CACHE_DIR to another folder'
    return '^%s$' % re.escape(message % (folder, reason))


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / 'file').touch()
    folder = tmp_path / 'file' / 'cache'
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    with pytest.warns(UserWarning, match=cannot_write(folder, 'Not a directory')):
        result = from_smiles(SMILES, 'gin', cache=True)
    assert_equal(result, from_smiles(SMILES, 'gin'))


def test_a_file_that_cannot_be_put_in_its_place_is_removed(folder, monkeypatch):
    def replace(old, new):
        raise OSError(errno.EIO, 'Input/output error')

    monkeypatch.setattr(os, 'replace', replace)
    with pytest.warns(UserWarning, match=cannot_write(folder, 'Input/output error')):
        from_smiles(SMILES, 'gin', cache=True)
    assert not list(folder.iterdir())


def test_what_was_not_used_for_the_longest_time_is_removed(folder, monkeypatch):
    files = []
    for i, smiles in enumerate((['C'], ['CC'], ['CCC'])):
        from_smiles(smiles, 'nfp', cache=True)
        (new,) = set(folder.iterdir()) - set(files)
        files.append(new)
        os.utime(new, (i, i))
    from_smiles(['C'], 'nfp', cache=True)  # used again
    others = {folder / 'results.npz', folder / ('a' * 64), folder / ('a' * 40)}  # a user's files
    for other in others:
        other.write_bytes(files[0].read_bytes())
        os.utime(other, (0, 0))
    size = files[0].stat().st_size
    monkeypatch.setattr(cache, 'MOST_BYTES', int(3.5 * size))
    from_smiles(['CCCC'], 'nfp', cache=True)
    assert set(folder.iterdir()) > {files[0], files[2], *others} and not files[1].exists()
    assert len(list(folder.iterdir())) == 6


def test_not_only_strings_are_not_kept(folder):
    with_none = from_smiles(['C', None], 'nfp', cache=True)
    assert with_none.failures[0].reason == 'expected a string, got NoneType'
    assert not folder.exists()
    from_smiles(numpy.array(['C', 'CC']), 'nfp', cache=True)
    assert folder.exists()


@pytest.mark.parametrize(
    'variables, expected',
    [
        ({}, '/home/me/.cache/chainer_bspmm'),
        ({'XDG_CACHE_HOME': '/var/cache/me'}, '/var/cache/me/chainer_bspmm'),
        ({cache.VARIABLE: '~/x', 'XDG_CACHE_HOME': '/var/cache/me'}, '/home/me/x'),
    ],
    ids=str,
)
def test_folder(monkeypatch, variables, expected):
    for name in (cache.VARIABLE, 'XDG_CACHE_HOME'):
        monkeypatch.delenv(name, raising=False)
    for name, value in {'HOME': '/home/me', **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache.directory() == pathlib.Path(expected)
