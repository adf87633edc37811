"""Harness of the benchmarks: gate, errors, conditions, files."""

import json
import re

import numpy
import pytest

from benchmarks import harness


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'int32'])
def test_relative_error(dtype):
    expected = numpy.array([3, 4], dtype)
    assert harness.relative_error(numpy.array([3, 4], dtype), expected) == 0
    assert harness.relative_error(numpy.array([3, 5], dtype), expected) == 0.2
    assert harness.relative_error(numpy.array([0, 5], dtype), 0 * expected) == 5
    # The squares would overflow in float16.
    assert harness.relative_error(100 * expected, 50 * expected) == 1


@pytest.mark.parametrize('error', [1e-5, 1, float('nan')])
def test_the_gate_closes(error):
    harness.gate({'good': 9e-6}, 1e-5)
    errors = {'good': 9e-6, 'bad': error}
    message = '^%s$' % re.escape('relative errors %s, expected below 1e-05' % errors)
    with pytest.raises(AssertionError, match=message):
        harness.gate(errors, 1e-5)


def test_summary():
    assert harness.summary([5.0, 1.0, 2.0, 3.0, 4.0]) == {'median': 3, 'low': 1.4, 'high': 4.6}


def test_arguments():
    args = harness.argument_parser('One line.\n\nMore.').parse_args(['--commit', 'abc'])
    assert (args.commit, args.out) == ('abc', None)


@pytest.fixture
def conditions():
    return harness.conditions('abc', harness.device_of('-1'))


def test_conditions(conditions):
    assert conditions['commit'] == 'abc'
    assert conditions['n_cpus'] > 0


def test_a_result_is_saved_by_its_machine(tmp_path, monkeypatch, conditions):
    monkeypatch.setattr(harness, 'RESULTS', tmp_path)
    path = harness.save('name', {'conditions': conditions})
    assert path == tmp_path / 'cpu' / 'name.json'
    assert json.loads(path.read_text())['conditions'] == conditions
    path = harness.save('name', {'conditions': {'gpu': 'NVIDIA H200'}})
    assert path == tmp_path / 'nvidia-h200' / 'name.json'


def test_a_result_is_saved_where_it_is_asked_for(tmp_path):
    assert harness.save('name', {}, str(tmp_path / 'out')) == tmp_path / 'out' / 'name.json'


@pytest.fixture
def head(conditions):
    """Head of a result, before anything is measured."""
    return {'conditions': conditions, 'options': {'limit': None, 'epochs': (1, 2)}}


@pytest.fixture
def stored(head, tmp_path):
    """Contents of the file of a result that began with `head` on another day and has data."""
    conditions = {**head['conditions'], 'date': '2020-01-01'}
    path = harness.save('name', {**head, 'conditions': conditions, 'data': {'a': 1}}, tmp_path)
    return json.loads(path.read_text())


def test_a_new_result_is_its_head(head, tmp_path):
    assert harness.resumed('name', head, tmp_path) == head


def test_a_result_with_the_same_head_is_completed(head, stored, tmp_path, capsys):
    assert harness.resumed('name', head, tmp_path) == stored
    assert capsys.readouterr().out == '%s continues\n' % (tmp_path / 'name.json')


@pytest.mark.parametrize('name, value', [('commit', 'abd'), ('numpy', '0'), ('torch', '2')])
def test_under_other_conditions_a_result_begins_anew(head, stored, tmp_path, capsys, name, value):
    new = {**head, 'conditions': {**head['conditions'], name: value}}
    assert harness.resumed('name', new, tmp_path) == json.loads(json.dumps(new))
    printed = capsys.readouterr().out
    assert printed == '%s begins anew: other %s\n' % (tmp_path / 'name.json', name)


@pytest.mark.parametrize('other', [{'options': {'limit': 3}}, {'method': 'more'}])
def test_with_other_options_a_result_begins_anew(head, stored, tmp_path, other):
    assert 'data' not in harness.resumed('name', {**head, **other}, tmp_path)


def test_a_result_of_a_changed_checkout_begins_anew(head, tmp_path):
    head['conditions']['commit'] = 'abc-dirty'
    harness.save('name', {**head, 'data': {}}, tmp_path)
    assert 'data' not in harness.resumed('name', head, tmp_path)
