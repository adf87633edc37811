"""The calculations of the benchmark of the report's figures, against hand-worked numbers."""

import numpy
import pytest

from benchmarks.products import figures


def point(times, figure='6a', n_b=8, n_bytes=1000, kind='device'):
    return {
        'figure': figure,
        'n_B': n_b,
        'bytes': n_bytes,
        'time_over_auto': {
            kind: figures.ratios({name: {'median': median} for name, median in times.items()})
        },
    }


@pytest.mark.parametrize('name', figures.FIGURES)
def test_random_matrices(name):
    figure = figures.FIGURES[name]
    matrices = figures.random_matrices(figure, numpy.random.RandomState(1))
    assert len(matrices) == figure.batch
    dims = {len(matrix) for matrix in matrices}
    assert all(matrix.shape == (len(matrix), len(matrix)) for matrix in matrices)
    counts = [set((matrix != 0).sum(axis=1)) for matrix in matrices]
    assert all(len(count) == 1 for count in counts), 'rows of one matrix have equally many'
    counts = {count.pop() for count in counts}
    for (low, high), got in ((figure.dims, dims), (figure.nnz_per_row, counts)):
        assert low <= min(got) and max(got) <= high
        assert len(got) == 1 if low == high else len(got) > 1


def test_ranges_of_n_b():
    first, last = {}, {}
    for name, figure in figures.FIGURES.items():
        first[name], last[name] = figure.n_b[0], figure.n_b[-1]
        assert all(b == 2 * a for a, b in zip(figure.n_b, figure.n_b[1:]))
    assert set(first.values()) == {8}
    assert (last.pop('6a'), last.pop('8'), set(last.values())) == (64, 1024, {512})


def test_gflops():
    assert figures.gflops(15000, 512, 5.0) == 3072  # 2 x 15000 x 512 operations in 5 us


def test_ratios():
    times = {
        'auto': {'median': 2.0},
        'fast': {'median': 1.0},
        'slow': {'median': 5.0},
        'lost in noise': {'median': -0.1},
    }
    assert figures.ratios(times) == {'fast': 0.5, 'slow': 2.5}
    assert figures.ratios({'auto': {'median': 0.0}, 'slow': {'median': 5.0}}) == {}


def test_geometric_means_over_the_points_that_a_contender_ran():
    points = [point({'auto': 1.0, 'a': 2.0, 'b': 3.0}), point({'auto': 1.0, 'a': 8.0})]
    assert figures.geometric_means(points, 'device') == {'a': 4, 'b': 3}


def test_losses():
    points = [
        point({'auto': 1.0, 'a': 1.5, 'b': 0.99}),
        point({'auto': 1.0, 'a': 0.9, 'b': 1.0, figures.COPY: 0.5}, n_b=16),
        point({'auto': 1.0, 'a': 0.99}, '8', n_bytes=2000000),
    ]
    assert figures.losses(points, 'device') == [
        {'figure': '6a', 'n_B': 16, 'contender': 'a', 'time_over_auto': 0.9, 'allowed': False},
        {'figure': '6a', 'n_B': 8, 'contender': 'b', 'time_over_auto': 0.99, 'allowed': True},
        {'figure': '8', 'n_B': 8, 'contender': 'a', 'time_over_auto': 0.99, 'allowed': False},
    ]


def test_headlines():
    def measured(figure, n_b, **more):
        return {
            'figure': figure,
            'n_B': n_b,
            'microseconds': {
                'device': {
                    name: {'median': time}
                    for name, time in {
                        'auto': 2.0,
                        'swa' + figures.TABLES: 6.0,
                        'st' + figures.TABLES: 5.0,
                        'swa': 1.0,
                        'x' + figures.LOOP: 50.0,
                        'y' + figures.LOOP: 40.0,
                        **more,
                    }.items()
                }
            },
        }

    points = [measured('6a', 64, **{figures.CUBLAS: 10.0}), measured('6a', 32), measured('8', 1024)]
    ours = {'swa or st' + figures.TABLES: 8.0, 'auto': 20.0}
    assert figures.headlines(points, 'device') == [
        {
            'figure': '6a',
            'n_B': 64,
            'over matrix by matrix': {'report, P100': 9.27, **ours},
            'over ' + figures.CUBLAS: {
                'report, P100': 1.26,
                'swa or st' + figures.TABLES: 2.0,
                'auto': 5.0,
            },
        },
        {'figure': '8', 'n_B': 1024, 'over matrix by matrix': {'report, P100': 3.29, **ours}},
    ]
