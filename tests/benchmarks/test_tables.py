"""The tables of the pages: cells of results that are partly missing."""

import json

import pytest

pytest.importorskip('rdkit')

from benchmarks import tables  # NOQA: E402


def cells(lines):
    return [line.strip('| ').split(' | ') for line in lines[2:]]


def of_steps(data, method, **batches):
    """Return a result of bench_steps; each of `batches` (`_32`) is contender -> milliseconds."""
    found = {}
    for name, medians in batches.items():
        times = {
            contender: {'wall': {'median': median}, 'busy': 0.974}
            for contender, median in medians.items()
        }
        found[name.strip('_')] = {'milliseconds': times}
    return {'data': {data: {'methods': {method: {'batches': found}}}}}


@pytest.mark.parametrize(
    'value, text', [(None, '-'), (0.326, '0.33'), (8.14, '8.1'), (16.8, '17'), ('0.3260', '0.3260')]
)
def test_cells(value, text):
    assert cells(tables.table(['a', 'b'], [['x', value]])) == [['x', text]]


JIT, SCAN = (tables.JAX[driver, 'FP32'] for driver in tables.DRIVERS)


def test_steps_beside_jax():
    times = {tables.PACKED: 0.1, tables.ON_DEVICE: 0.125, JIT: 0.15}
    result = of_steps('tox21', 'gin', _1024=times, _32={**times, SCAN: 0.3})
    first, second = cells(tables.jax(result))
    assert first[:6] == ['Tox21, GIN, 32', '0.100', '0.125', '-', '0.150', '-']
    assert first[6:] == ['0.300', '-', '1.50', '-', '97 %']
    assert second[0] == 'Tox21, GIN, 1,024' and second[-3:] == ['-', '-', '97 %']


def test_steps_beside_jax_on_a_cpu():
    (row,) = cells(tables.jax_cpu(of_steps('qm9', 'gin', _32={tables.EAGER_PACKED: 10.0, JIT: 12})))
    assert row == ['QM9, GIN, 32', '10.0', '-', '12.0', '-', '1.20', '-']


def test_a_method_is_beside_upstream_at_the_largest_batch_of_both():
    ours = {tables.ON_DEVICE: 1.25}
    both = {**ours, tables.UPSTREAM: 500.0}
    (row,) = cells(tables.methods(of_steps('tox21', 'relgat', _128=ours, _32=both)))
    assert row == ['`relgat`', '32', '`DeviceDataset`', '500', '1.2', '400', '97 %']


def test_a_method_without_a_batch():
    (row,) = cells(tables.methods({'data': {'tox21': {'methods': {'nfp': {'batches': {}}}}}}))
    assert row == ['`nfp`'] + ['-'] * 6


def test_command():
    def found(seconds, is_extrapolated=False):
        return {'seconds': seconds, 'is_extrapolated': is_extrapolated}

    whole = {
        'upstream dense': {'warm': found(200.0, True), 'commit': 'earlier'},
        'ours eager': {},
        'ours captured': {'cold': found(16.5), 'warm': found(10.0)},
    }
    methods = {'relgcn': whole, 'rsgcn': {'ours captured': {'cold': found(9.0)}}}
    first, second = cells(tables.command({'data': {'qm9': {'methods': methods}}}))
    assert first == ['QM9, RelGCN', 'about 200*', '-', '10', '20', '-', '-', '16', '-']
    assert second == ['QM9, RSGCN', '-', '-', '-', '-', '-', '-', '9.0', '-']


def test_quality():
    arms = {
        'dense': {'mean': 0.71234, 'standard deviation': 0.0216},
        'packed': {'mean': 0.75, 'standard deviation': None},
    }
    (row,) = cells(tables.quality({'summary': {'tox21': {'gin': arms}}}))
    assert row == ['GIN, Tox21, mean ROC-AUC', '0.712 ± 0.022', '-', '-', '0.750']


def test_errors_in_tf32():
    errors = {
        name: {'loss': 2.14e-8 * factor, 'norm': 4.4e-7 * factor, 'worst parameter': 1.0}
        for names in (tables.bench_widths.OURS, tables.bench_widths.UPSTREAM_S)
        for name, factor in ((names['FP32'], 1), (names['TF32'], 1e4))
    }
    found = tables.tf32_errors({'errors': {'256': {'gin': {'errors': errors}}, '64': {}}})
    (row,) = cells(found)
    assert row == ['GIN, 256 units', *2 * ['2e-08, 4e-07', '2e-04, 4e-03']]


def test_trainings_in_tf32():
    of = {
        'FP32': [0.71, 0.73],
        'TF32': [0.7123, 0.7301],
        'mean difference': 0.0012,
        'standard deviation between seeds': 0.0141,
    }
    (row,) = cells(tables.tf32_trainings({'summary': {'tox21': {'ggnn': of}}}))
    assert row == ['GGNN, Tox21, mean ROC-AUC', '0.710 0.730', '0.712 0.730', '+0.0012', '0.0141']


def test_a_page_keeps_what_is_not_stored(tmp_path):
    (tmp_path / 'earlier').mkdir()
    (tmp_path / 'earlier' / 'quality.json').write_text(json.dumps({'summary': {}}))
    block = '<!-- table: %s -->\nbefore\n<!-- end -->'
    text, missing = tables.page('a\n%s\nb\n%s' % (block % 'quality', block % 'methods'), tmp_path)
    assert missing == ['methods']
    assert text.startswith('a\n<!-- table: quality -->\n|  | upstream dense |')
    assert text.count('before') == 1 and text.endswith(block % 'methods')
