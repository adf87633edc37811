"""Benchmark of looks, on the host."""

import json

import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
from benchmarks.training import bench_looks as bench  # NOQA: E402
from chainer_bspmm.training.guards import Guards  # NOQA: E402


@pytest.fixture(scope='module')
def trainers():
    return bench.trained(chainer.get_device('@numpy'))


@pytest.mark.parametrize('name', ['rsgcn', 'ggnn', bench.OWN])
def test_looks_find_a_change_and_nothing_else(trainers, name):
    bench.check(trainers[name])


def test_a_look_that_finds_nothing_is_refused(trainers, monkeypatch):
    monkeypatch.setattr(Guards, 'key', lambda guards: guards._key)
    with pytest.raises(AssertionError, match='^a look does not find a new attribute$'):
        bench.check(trainers['rsgcn'])


def test_a_look_that_always_finds_a_change_is_refused(trainers, monkeypatch):
    monkeypatch.setattr(Guards, 'key', lambda guards: object())
    with pytest.raises(AssertionError, match='^a look finds a change where there is none$'):
        bench.check(trainers['rsgcn'])


def test_attributes_and_dicts_of_a_user_are_watched(trainers):
    texts = bench.watching(trainers[bench.OWN]).reach.texts()
    assert len([text for text in texts if ' option_' in text]) == 30
    assert len([text for text in texts if ' weights' in text or ' shares' in text]) >= 20


def test_results(tmp_path):
    bench.main(['--device', '-1', '--rounds', '1', '--commit', 'none', '--out', str(tmp_path)])
    result = json.loads((tmp_path / 'looks.json').read_text())
    assert list(result['models']) == ['rsgcn', 'ggnn', bench.OWN]
    for of in result['models'].values():
        assert 0 < of['look']['median'] < of['inventory']['median']
