"""The parity table as a page and as files; tests/models/test_parity.py compares the models."""

import json
import re

import chainer_bspmm  # NOQA: F401  (before chainer)

from benchmarks import parity


def test_page_and_file(tmp_path, monkeypatch):
    names = ('RSGCN', 'one layer'), ('NFP', 'defaults')
    cases = [case for name in names for case in parity.ALL_CASES if case[:2] == name]
    monkeypatch.setattr(parity, 'ALL_CASES', cases)
    monkeypatch.setattr(parity, 'CRASHES', parity.CRASHES[1:2])
    monkeypatch.setattr(parity, 'PAGE', tmp_path / 'parity.md')
    assert parity.main(['--commit', 'abc', '--out', str(tmp_path)]) == 0
    result = json.loads((tmp_path / 'cpu' / 'parity.json').read_text())
    monkeypatch.setattr(parity, 'compare', None)  # nothing is left to do
    assert parity.main(['--commit', 'abc', '--out', str(tmp_path)]) == 0
    assert json.loads((tmp_path / 'cpu' / 'parity.json').read_text()) == result
    gpu = dict(result, conditions=dict(result['conditions'], gpu='Some GPU', cupy='14'))
    gpu['cases'] = [dict(gpu['cases'][0], failures=['packed output: 1e-3 > 1e-5'])]
    (tmp_path / 'some-gpu').mkdir()
    (tmp_path / 'some-gpu' / 'parity.json').write_text(parity.dumps(gpu))
    assert parity.main(['--page', '--out', str(tmp_path)]) == 0
    page = (tmp_path / 'parity.md').read_text()
    assert 'Rows beyond a bound: 0 of 2. On' in page
    assert re.search('On Some GPU, .*, CuPy 14, commit abc, .*: rows beyond a bound: 1 of 1', page)
    for case in result['cases']:
        assert '| %s | %s |' % (case['model'], case['options']) in page
        for layout in ('packed', 'folded', 'padded'):
            names = case['layouts'][layout]
            assert all(len(names[name]) == 3 for name in names) and 'output' in names
    rows = [line for line in page.splitlines() if re.match(r'\| (RSGCN|NFP|) ?\|', line)]
    assert len(rows) == 3 and all(row.count('|') == 10 for row in rows)
    assert rows[-1].startswith('| | defaults, masked | | | ') and rows[-1].count('e-') == 9


def test_the_page_is_of_the_stored_files():
    assert parity.PAGE.read_text() == parity.page(parity.RESULTS)
    stored = json.loads((parity.RESULTS / 'cpu' / 'parity.json').read_text())
    assert not any(case['failures'] for case in stored['cases'])
    names = [(case['model'], case['options']) for case in stored['cases']]
    assert names == [(case.model, case.options) for case in parity.ALL_CASES]
