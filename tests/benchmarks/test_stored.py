"""Summaries of measured times equal the stored ones."""

import json

import numpy
import pytest

pytest.importorskip('rdkit')

from benchmarks import bench_command, harness  # NOQA: E402
from benchmarks.products import figures  # NOQA: E402
from benchmarks.training import bench_quality, bench_scaling, bench_steps  # NOQA: E402
from benchmarks.training import bench_two_lines, bench_widths  # NOQA: E402


def stored(name, on_cpu=False):
    return json.loads(harness.stored(name, on_cpu).read_text())


@pytest.mark.parametrize(
    'against, on_cpu', [*((against, False) for against in bench_steps.STUDIES), ('jax', True)]
)
def test_bars_of_steps(against, on_cpu):
    study = bench_steps.STUDIES[against]
    result = stored(study.name, on_cpu)
    assert bench_steps.bars(result['data'], study) == result['bars'] != {}


@pytest.mark.parametrize('on_cpu', [False, True])
def test_bars_of_two_lines(on_cpu):
    result = stored('two_lines', on_cpu)
    assert bench_two_lines.bars(result, not on_cpu) == result['bars'] != {}


def test_bars_of_widths():
    result = stored('widths')
    assert bench_widths.bars(result['data']) == result['bars'] != {}


def test_summary_of_the_quality():
    result = stored('quality')
    assert bench_quality.summary(result['runs']) == result['summary'] != {}


def test_bars_of_commands():
    result = stored('command')
    assert bench_command.bars(result['data']) == result['bars'] != {}


def test_scaling_with_other_links(tmp_path):
    before = stored('scaling')
    options = ['--again', str(harness.stored('scaling')), '--out', str(tmp_path)]
    bench_scaling.main(options)
    assert json.loads((tmp_path / 'scaling.json').read_text()) == before
    bench_scaling.main([*options, '--us-of-a-second-launch', '100'])
    after = json.loads((tmp_path / 'scaling.json').read_text())
    assert after['ranks'] == before['ranks'] and after['conditions'] == before['conditions']
    old = before['summary']['rsgcn']['weak']['128']
    new = after['summary']['rsgcn']['weak']['128']
    assert new['8'] == old['8'] and new['64']['modelled'] < old['64']['modelled'] / 1.5


def test_figures():
    result = stored('figures')
    for point in result['points']:
        for kind, times in point['microseconds'].items():
            assert figures.ratios(times) == point['time_over_auto'][kind]
            for name, rate in point['gflops'][kind].items():
                median = times[name]['median']
                assert figures.gflops(point['nnz'], point['n_B'], median) == rate
    for kind, summary in result['summary'].items():
        means = figures.geometric_means(result['points'], kind)
        assert means == summary['geometric_mean_time_over_auto']
        assert figures.losses(result['points'], kind) == summary['auto_is_slower']
        assert figures.headlines(result['points'], kind) == summary['headlines'] != []


@pytest.mark.parametrize('name', figures.FIGURES)
def test_matrices_of_figures(name):
    figure = figures.FIGURES[name]
    matrices = figures.random_matrices(figure, numpy.random.RandomState(1))
    assert len(matrices) == figure.batch
    counts = [set((matrix != 0).sum(axis=1)) for matrix in matrices]
    assert all(len(count) == 1 for count in counts), 'rows of a matrix are unequal'
    found = {len(matrix) for matrix in matrices}, {count.pop() for count in counts}
    for (low, high), got in zip((figure.dims, figure.nnz_per_row), found):
        assert low <= min(got) and max(got) <= high
        assert len(got) == 1 if low == high else len(got) > 1
    points = [(point['figure'], point['n_B']) for point in stored('figures')['points']]
    assert [n_b for figure_name, n_b in points if figure_name == name] == figure.n_b
