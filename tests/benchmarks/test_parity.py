"""The parity table: the wrappers and MPNN in full, what a failure looks like, the page.

The other models have parity tests of their own in tests/models.
"""

import json
import re

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (before chainer)
import chainer

from benchmarks import parity

OWN_TESTS = ('RSGCN', 'NFP', 'GIN', 'GGNN', 'RelGCN', 'RelGAT', 'GNNFiLM')
WRAPPERS = tuple(case for case in parity.CASES if case.model not in OWN_TESTS)


def name_of(case):
    return '%s, %s' % (case.model, case.options)


@pytest.mark.parametrize('case', WRAPPERS, ids=name_of)
def test_wrappers(device, case):
    found = parity.compare(case, device)
    assert {'packed', 'padded'} <= found.keys()
    assert not parity.failures(found)


@pytest.mark.parametrize('model', OWN_TESTS)
def test_the_table_has_every_model(model):
    assert sum(case.model == model for case in parity.CASES) >= 6


def test_cases_have_names_of_their_own():
    assert len({name_of(case) for case in parity.CASES}) == len(parity.CASES)


@pytest.mark.parametrize('case', parity.CRASHES, ids=name_of)
def test_upstream_fails(case):
    assert parity.crash(case) in ('InvalidType', 'IndexError')


def test_a_mistake_is_found(monkeypatch):
    """A relation layer that loses its bias shows in output and gradients, in both layouts."""
    from chainer_bspmm.links import relgcn_update

    relation_linear = relgcn_update.relation_linear
    monkeypatch.setattr(
        relgcn_update,
        'relation_linear',
        lambda adj, h, W, b, *own: relation_linear(adj, h, W, b * 0.9999, *own),
    )
    case = next(case for case in parity.CASES if case.model == 'RelGCN')
    beyond = parity.failures(parity.compare(case, chainer.get_device('@numpy')))
    assert any(line.startswith('packed output: ') for line in beyond)
    assert any(line.startswith('padded /rgcn_convs/') for line in beyond)
    assert any(line.endswith(' in float64') for line in beyond)


def test_errors():
    truth = {
        'output': numpy.array([3.0, 4.0]),
        '/a': numpy.array([1e-12]),
        '/b': numpy.array([2.0]),
    }
    actual = {
        'output': numpy.array([3.0, 4.5]),
        '/a': numpy.array([2e-12]),
        '/b': numpy.array([1.0]),
    }
    found = parity.errors(actual, truth)
    assert found['output'] == pytest.approx(0.1) and found['/b'] == pytest.approx(0.5)
    assert found['/a'] == pytest.approx(5e-13)  # 0 but for rounding: against all gradients
    with pytest.raises(AssertionError, match='other parameters: /b'):
        parity.errors({name: truth[name] for name in ('output', '/a')}, truth)


def test_nan_is_a_failure():
    e = {'upstream': 1e-7, 'ours': float('nan'), 'ours float64': float('nan')}
    assert len(parity.failures({'packed': {'output': e}})) == 2


def test_page_and_file(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, 'CASES', WRAPPERS[:1] + parity.CASES[:1])
    monkeypatch.setattr(parity, 'PAGE', tmp_path / 'parity.md')
    assert parity.main(['--commit', 'abc', '--out', str(tmp_path)]) == 0
    result = json.loads((tmp_path / 'cpu' / 'parity.json').read_text())
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
        names = case['layouts']['packed']
        assert all(len(names[name]) == 3 for name in names) and 'output' in names
    rows = [line for line in page.splitlines() if re.match(r'\| (MPNN|RSGCN) ', line)]
    assert len(rows) == 2 and all(row.count('|') == 10 for row in rows)


def test_the_page_is_of_the_stored_files():
    assert parity.PAGE.read_text() == parity.page(parity.RESULTS)
    stored = json.loads((parity.RESULTS / 'cpu' / 'parity.json').read_text())
    assert not any(case['failures'] for case in stored['cases'])
    assert [(case['model'], case['options']) for case in stored['cases']] == [
        (case.model, case.options) for case in parity.CASES
    ]
