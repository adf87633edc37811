"""Parity table as a page and as files; models are compared in tests/models/test_parity.py."""

import json
import re
import shutil

import pytest

import chainer_bspmm  # NOQA: F401  (before chainer)

from benchmarks import parity


CASES = [('RSGCN', 'one layer'), ('NFP', 'defaults')]


def few(monkeypatch):
    """Leave only two cases, and one that upstream cannot run."""
    cases = {(case.model, case.options): case for case in parity.ALL_CASES}
    monkeypatch.setattr(parity, 'ALL_CASES', [cases[name] for name in CASES])
    monkeypatch.setattr(parity, 'CRASHES', parity.CRASHES[1:2])


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    """Folder with the result of two cases, on this CPU."""
    folder = tmp_path_factory.mktemp('parity')
    with pytest.MonkeyPatch.context() as monkeypatch:
        few(monkeypatch)
        assert parity.main(['--commit', 'abc', '--out', str(folder)]) == 0
    return folder


@pytest.fixture
def folder(measured, tmp_path, monkeypatch):
    """Copy of the folder `measured`, which is also the place of the page."""
    few(monkeypatch)
    monkeypatch.setattr(parity, 'PAGE', tmp_path / 'parity.md')
    shutil.copytree(measured, tmp_path, dirs_exist_ok=True)
    return tmp_path


def read(folder):
    return json.loads((folder / 'cpu' / 'parity.json').read_text())


def test_the_file_has_every_array_of_every_layout(folder):
    result = read(folder)
    assert [(case['model'], case['options']) for case in result['cases']] == CASES
    for case in result['cases']:
        for layout in ('packed', 'folded', 'padded'):
            errors = case['layouts'][layout]
            assert 'output' in errors and len(errors) > 1
            assert all(len(columns) == 3 for columns in errors.values())


def test_stored_cases_are_not_compared_again(folder, monkeypatch):
    before = read(folder)
    monkeypatch.setattr(parity, 'compare', None)
    assert parity.main(['--commit', 'abc', '--out', str(folder)]) == 0
    assert read(folder) == before


def test_the_page_has_a_row_for_every_case(folder):
    assert parity.main(['--page', '--out', str(folder)]) == 0
    page = (folder / 'parity.md').read_text()
    assert 'Rows beyond a bound: 0 of 2. On' in page
    for model, options in CASES:
        assert '| %s | %s |' % (model, options) in page
    rows = [line for line in page.splitlines() if re.match(r'\| (RSGCN|NFP|) ?\|', line)]
    assert len(rows) == 3 and all(row.count('|') == 10 for row in rows)
    assert rows[-1].startswith('| | defaults, masked | | | ') and rows[-1].count('e-') == 9


def test_the_page_names_other_machines(folder):
    result = read(folder)
    gpu = dict(result, conditions=dict(result['conditions'], gpu='Some GPU', cupy='14'))
    gpu['cases'] = [dict(gpu['cases'][0], failures=['packed output: 1e-3 > 1e-5'])]
    (folder / 'some-gpu').mkdir()
    (folder / 'some-gpu' / 'parity.json').write_text(parity.dumps(gpu))
    assert parity.main(['--page', '--out', str(folder)]) == 0
    page = (folder / 'parity.md').read_text()
    assert re.search('On Some GPU, .*, CuPy 14, commit abc, .*: rows beyond a bound: 1 of 1', page)


def test_the_page_is_of_the_stored_files():
    assert parity.PAGE.read_text() == parity.page(parity.RESULTS)


def test_the_stored_file_has_every_case():
    stored = json.loads((parity.RESULTS / 'cpu' / 'parity.json').read_text())
    assert not any(case['failures'] for case in stored['cases'])
    names = [(case['model'], case['options']) for case in stored['cases']]
    assert names == [(case.model, case.options) for case in parity.ALL_CASES]
