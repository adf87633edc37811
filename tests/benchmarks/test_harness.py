"""The harness of the benchmarks: gate, errors, conditions, files."""

import json

import numpy
import pytest

from benchmarks import harness


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'int32'])
def test_relative_error(dtype):
    expected = numpy.array([3, 4], dtype)
    assert harness.relative_error(numpy.array([3, 4], dtype), expected) == 0
    assert harness.relative_error(numpy.array([3, 5], dtype), expected) == 0.2
    assert harness.relative_error(numpy.array([0, 5], dtype), 0 * expected) == 5
    # In float16 the squares would overflow.
    assert harness.relative_error(100 * expected, 50 * expected) == 1


@pytest.mark.parametrize('error', [1e-5, 1, float('nan')])
def test_the_gate_closes(error):
    harness.gate({'good': 9e-6}, 1e-5)
    with pytest.raises(AssertionError, match='relative errors .*bad.*, expected below 1e-05'):
        harness.gate({'good': 9e-6, 'bad': error}, 1e-5)


def test_summary():
    assert harness.summary([5.0, 1.0, 2.0, 3.0, 4.0]) == {'median': 3, 'low': 1.4, 'high': 4.6}


def test_files_and_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, 'RESULTS', tmp_path)
    args = harness.argument_parser('One line.\n\nMore.').parse_args(['--commit', 'abc'])
    assert (args.commit, args.out) == ('abc', None)
    conditions = harness.conditions('abc', harness.device_of('-1'))
    assert conditions['commit'] == 'abc' and conditions['n_cpus'] > 0
    path = harness.save('name', {'conditions': conditions})
    assert path == tmp_path / 'cpu' / 'name.json'
    assert json.loads(path.read_text())['conditions'] == conditions
    path = harness.save('name', {'conditions': {'gpu': 'NVIDIA H200'}})
    assert path == tmp_path / 'nvidia-h200' / 'name.json'
    assert harness.save('name', {}, str(tmp_path / 'out')) == tmp_path / 'out' / 'name.json'


def test_a_result_is_completed_unless_it_began_otherwise(tmp_path, capsys):
    conditions = harness.conditions('abc', harness.device_of('-1'))
    head = {'conditions': conditions, 'options': {'limit': None, 'epochs': (1, 2)}}
    assert harness.resumed('name', head, tmp_path) == head
    stored = {**head, 'conditions': {**conditions, 'date': '2020-01-01'}, 'data': {'a': 1}}
    harness.save('name', stored, tmp_path)
    stored['options']['epochs'] = [1, 2]
    assert harness.resumed('name', head, tmp_path) == stored
    assert capsys.readouterr().out == '%s goes on\n' % (tmp_path / 'name.json')
    for name, value in (('commit', 'abd'), ('numpy', '0'), ('torch', '2')):
        new = {**head, 'conditions': {**conditions, name: value}}
        assert harness.resumed('name', new, tmp_path) == json.loads(json.dumps(new))
        assert capsys.readouterr().out.endswith('begins anew: other %s\n' % name)
    assert 'data' not in harness.resumed('name', {**head, 'options': {'limit': 3}}, tmp_path)
    assert 'data' not in harness.resumed('name', {**head, 'method': 'more'}, tmp_path)
    head['conditions'] = {**conditions, 'commit': 'abc-dirty'}
    harness.save('name', {**head, 'data': {}}, tmp_path)
    assert 'data' not in harness.resumed('name', head, tmp_path)
