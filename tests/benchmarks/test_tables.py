"""Tables of the pages: cells of results that are partly missing."""

import json

import pytest

pytest.importorskip('rdkit')

from benchmarks import tables  # NOQA: E402


def cells(lines):
    return [line.strip('| ').split(' | ') for line in lines[2:]]


def of_steps(data, method, **batches):
    """Return a result of bench_steps; each batch, such as `_32`, is contender -> milliseconds."""
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
JIT_TF32, SCAN_TF32 = (tables.JAX[driver, 'TF32'] for driver in tables.DRIVERS)


def test_epochs_have_a_column_for_each_model():
    def cell(upstream, ours):
        seconds = {
            tables.bench_two_lines.UPSTREAM: {'median': upstream},
            tables.bench_two_lines.TWO_LINES: {'median': ours},
        }
        return {'seconds an epoch': seconds}

    methods = {'gin': {'32': cell(1.0, 0.02)}, 'nfp': {'32': cell(3.0, 0.05), '128': cell(1, 2)}}
    lines = tables.two_lines({'data': {'NCI compounds shipped with RDKit': methods}})
    assert lines[0] == '| times as fast (ms an epoch) | GIN | NFP |'
    first, second = cells(lines)
    assert first == ['NCI, batch 32', '50 (1000 → 20)', '60 (3000 → 50)']
    assert second == ['NCI, batch 128', '-', '0.50 (1000 → 2000)']


def test_steps_beside_jax():
    times = {tables.PACKED: 0.1, JIT: 0.15, SCAN: 0.2}
    whole = {**times, JIT_TF32: 0.2, SCAN_TF32: 0.125}
    result = of_steps('tox21', 'gin', _1024=times, _32=whole)
    first, second = cells(tables.jax(result))
    assert first == ['Tox21, batch 32', '1.50, 1.25 (0.100)']
    assert second == ['Tox21, batch 1,024', '1.50, - (0.100)']


def test_steps_beside_jax_on_a_cpu():
    (row,) = cells(tables.jax_cpu(of_steps('qm9', 'gin', _32={tables.EAGER_PACKED: 10.0, JIT: 12})))
    assert row == ['QM9, batch 32', '1.20, - (10.0)']


def test_a_method_is_beside_upstream_at_the_largest_batch_of_both():
    ours = {tables.ON_DEVICE: 1.25}
    both = {**ours, tables.UPSTREAM: 500.0}
    (row,) = cells(tables.methods(of_steps('tox21', 'relgat', _128=ours, _32=both)))
    assert row == ['RelGAT', '400 (500 → 1.2), batch 32'] + ['-'] * 4


def test_a_variant_stands_in_the_line_of_its_method():
    both = {tables.CAPTURED: 2.0, tables.UPSTREAM: 40.0}
    (row,) = cells(tables.methods(of_steps('tox21', 'nfp_cwle', _128=both)))
    assert row == ['NFP', '-', '-', '-', '20 (40 → 2.0)', '-']


def test_a_method_without_a_batch():
    (row,) = cells(tables.methods({'data': {'tox21': {'methods': {'nfp': {'batches': {}}}}}}))
    assert row == ['NFP'] + ['-'] * 5


def test_widths():
    names = tables.bench_widths.UPSTREAM_S['FP32'], tables.bench_widths.OURS['FP32']
    cell = of_steps('tox21', 'gin', _128=dict(zip(names, (30.0, 0.5))))['data']['tox21']
    result = {'data': {'256': cell['methods']}}
    first, second = cells(tables.widths(result))
    assert first == ['256 units, FP32', '60 (30 → 0.50)']
    assert second == ['256 units, TF32', '-']


def test_widths_beside_jax():
    ours = tables.bench_widths.OURS
    times = {ours['FP32']: 0.1, ours['TF32']: 0.05, JIT: 0.2, SCAN: 0.15, JIT_TF32: 0.1}
    cell = of_steps('tox21', 'gin', _128={**times, SCAN_TF32: 0.2}, _32=times)['data']['tox21']
    (row,) = cells(tables.widths_jax({'data': {'512': cell['methods']}}))
    assert row == ['512 units, batch 128', '1.50, 2.00']


def test_wide_layers_over_their_products():
    names = tables.bench_widths.OURS
    milliseconds = {names['FP32']: {'device': 0.75}, names['TF32']: {'device': 0.5}}
    cell = {'milliseconds': milliseconds, 'products': {'FP32': 0.5, 'TF32': 0.4}}
    methods = {'gin': {'batches': {'128': cell, '32': cell}}}
    first, second = cells(tables.widths_products({'data': {'512': methods, '64': methods}}))
    assert first == ['512 units, batch 128, FP32', '1.50 (0.75)']
    assert second == ['512 units, batch 128, TF32', '1.25 (0.50)']


def test_answer_about_wide_layers():
    upstream, ours = tables.bench_widths.UPSTREAM_S, tables.bench_widths.OURS
    times = {ours['FP32']: 0.5, ours['TF32']: 0.25, upstream['FP32']: 10.0, upstream['TF32']: 7.5}
    jax = {JIT: 0.6, SCAN: 0.55, JIT_TF32: 0.3, SCAN_TF32: 0.5}
    cells = of_steps('tox21', 'gin', _128={**times, **jax}, _32=times)['data']['tox21']['methods']
    assert tables.of_answers.wide_layers({'data': {'256': cells, '16': {}}}) == (
        "At 256 units a step of 128 molecules is 20 times as fast as upstream's in FP32 and 30 in "
        'TF32. At 16 to 256 units JAX takes 1.1 times as long as ours in FP32 and 1.2 in TF32: '
        '[wide layers](#wide-layers)'
    )


def test_scaling():
    def of_ranks(wall, **more):
        return {'methods': {'gin': {'128': {'wall': {'median': wall}, **more}}}}

    ranks = {
        '1': of_ranks(0.15, **{'bytes of gradients': 282_000}),
        '2': of_ranks(0.2, **{'exchange alone, us': 9.6}),
        '4': of_ranks(0.25),
    }
    weak = {'128': {'2': {'measured': 0.75}, '4': {'measured': 0.6}, '8': {'modelled': 0.5}}}
    summary = {'gin': {'weak': weak, 'strong': {'2': 1.5, '4': 2.5}}}
    lines = tables.scaling({'ranks': ranks, 'summary': summary})
    heads = ['gradients', 'exchange of two', 'batch 128: one GPU', '2 GPUs', '4 GPUs']
    heads += ['1,024 shared by 2', '1,024 shared by 4']
    assert lines[0] == '| model | %s |' % ' | '.join(heads)
    (row,) = cells(lines)
    assert row == ['GIN', '282 KB', '9.6 us', '150 us', '0.75', '0.60', '1.50', '2.50']


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


def test_commands_in_short():
    runs = {
        'upstream dense': {'warm': {'seconds': 200.0, 'is_extrapolated': True}},
        'ours captured': {'cold': {'seconds': 16.5, 'is_extrapolated': False}},
    }
    lines = tables.command_short({'data': {'qm9': {'methods': {'relgcn': runs}}}})
    assert [row[-1] for row in cells(lines)] == ['about 200', '-', '-', '16']


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
