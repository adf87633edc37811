"""The tables of docs/performance.md: cells of results that are partly missing."""

import json

import pytest

pytest.importorskip('rdkit')

from benchmarks import tables  # NOQA: E402


def cells(lines):
    return [line.strip('| ').split(' | ') for line in lines[2:]]


def summary(median, low=None, high=None):
    return {'median': median, 'low': low, 'high': high}


@pytest.mark.parametrize(
    'value, text', [(None, None), (0.326, '0.33'), (8.14, '8.1'), (16.8, '17'), (292.4, '292')]
)
def test_numbers(value, text):
    assert tables.number(value) == text


def test_jax():
    names = tables.JAX
    times = {tables.PACKED: 0.1, tables.ON_DEVICE: 0.125, names['jit', 'FP32']: 0.15}
    cell = {
        'milliseconds': {name: {'wall': summary(ms), 'busy': 0.97} for name, ms in times.items()}
    }
    whole = {
        'milliseconds': {**cell['milliseconds'], names['scan', 'FP32']: {'wall': summary(0.3)}}
    }
    methods = {'gin': {'batches': {'1024': cell, '32': whole}}}
    lines = tables.jax({'data': {'tox21': {'methods': methods}}})
    first, second = cells(lines[2:])
    assert first[:6] == ['Tox21, GIN, 32', '0.100', '0.125', '-', '0.150', '-']
    assert first[6:] == ['0.300', '-', '1.50', '-', '97 %']
    assert second[0] == 'Tox21, GIN, 1,024' and second[-3:] == ['-', '-', '97 %']


def test_jax_on_a_cpu():
    times = {tables.EAGER_PACKED: 10.0, tables.JAX['jit', 'FP32']: 12.0}
    cell = {'milliseconds': {name: {'wall': summary(ms)} for name, ms in times.items()}}
    methods = {'gin': {'batches': {'32': cell}}}
    (row,) = cells(tables.jax_cpu({'data': {'qm9': {'methods': methods}}}))
    assert row == ['QM9, GIN, 32', '10.0', '-', '12.0', '-', '1.20', '-']


def test_floors():
    names = 'kernels device_us kernels_us bytes_us flops_us launches_us floor_us'.split()
    packed = dict(zip(names, [20.0, 88.2, 61.0, 3.4, 1.2, 26.0, 29.4]))
    methods = {'rsgcn': {'batches': {'128': {'packed': packed, 'folded': {}}}}}
    (row,) = cells(tables.floors({'data': {'qm9': {'methods': methods}}}))
    assert row == ['QM9, RSGCN, 128', '20', '88', '61', '3.4', '1.2', '26.0', '29.4']


def test_command():
    def found(seconds, is_extrapolated=False):
        return {'seconds': seconds, 'is_extrapolated': is_extrapolated}

    whole = {
        'upstream dense': {'warm': found(200.0, True), 'commit': 'earlier'},
        'ours eager': {},
        'ours captured': {'cold': found(16.5), 'warm': found(10.0)},
    }
    methods = {'relgcn': whole, 'rsgcn': {'ours captured': {'cold': found(9.0)}}}
    first, second = cells(tables.command({'data': {'qm9': {'methods': methods}}})[2:-2])
    assert first == ['QM9, RelGCN', 'about 200*', '-', '10', '20', '-', '-', '16', '-']
    assert second == ['QM9, RSGCN', '-', '-', '-', '-', '-', '-', '9.0', '-']


def test_layouts():
    cell = {
        'folded': summary(0.3501),
        'packed': summary(0.333),
        'folded over packed': summary(1.051, 1.02, 1.11),
    }
    methods = {'gin': {'batches': {'128': cell, '1024': cell}}, 'nfp': {'batches': {'128': cell}}}
    lines = tables.layouts({'data': {'tox21': {'methods': methods}}})
    assert 'batch 128: folded' in lines[0] and 'batch 1,024: folded' in lines[0]
    first, second = cells(lines)
    assert first[1:4] == first[4:] == second[1:4] == ['0.350', '0.333', '1.05 (1.02 to 1.11)']
    assert second[4:] == ['-'] * 3


def test_methods():
    times = {
        tables.UPSTREAM: {'wall': summary(500.0)},
        tables.ON_DEVICE: {'wall': summary(1.25), 'busy': 0.974},
    }
    small = {'milliseconds': times, 'over upstream': 400.0}
    large = {'not_run': 'out of memory'}
    found = {
        'relgat': {'batches': {'128': large, '32': small}},
        'gin': {'batches': {'128': small}},
        'nfp': {'wrong': 'very'},
    }
    relgat, gin, nfp = cells(tables.methods({'methods': found}))
    assert relgat == ['`relgat`', '32', '`DeviceDataset`', '500', '1.2', '400, at least 20', '97 %']
    assert gin[1] == '128' and gin[5] == '400'
    assert nfp == ['`nfp`'] + ['-'] * 6


def test_quality():
    arms = {
        'dense': {'mean': 0.71234, 'standard deviation': 0.0216},
        'packed': {'mean': 0.75, 'standard deviation': None},
    }
    (row,) = cells(tables.quality({'summary': {'tox21': {'gin': arms}}}))
    assert row == ['GIN, Tox21, mean ROC-AUC', '0.712 ± 0.022', '-', '-', '0.750']


def test_a_page_keeps_what_is_not_stored(tmp_path):
    (tmp_path / 'nvidia-h200').mkdir()
    (tmp_path / 'nvidia-h200' / 'quality.json').write_text(json.dumps({'summary': {}}))
    block = '<!-- table: %s -->\nbefore\n<!-- end -->'
    text, missing = tables.page('a\n%s\nb\n%s' % (block % 'quality', block % 'methods'), tmp_path)
    assert missing == ['nvidia-h200/methods.json']
    assert text.startswith('a\n<!-- table: quality -->\n|  | upstream dense |')
    assert text.count('before') == 1 and text.endswith(block % 'methods')
