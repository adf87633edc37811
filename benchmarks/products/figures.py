"""The points of the report's figures 6 to 8, and ratios of measured times; needs no GPU.

Source: Nagasaka, Nukada, Kojima, Matsuoka 2019, section 5.
"""

import collections
import math

import numpy

# dims, nnz_per_row: the least and the largest; drawn separately for every matrix.
Figure = collections.namedtuple('Figure', 'batch dims nnz_per_row n_b')

FIGURES = {
    '6a': Figure(50, (50, 50), (2, 2), [2**p for p in range(3, 7)]),
    '6b': Figure(100, (50, 50), (3, 3), [2**p for p in range(3, 10)]),
    '7a': Figure(100, (32, 32), (3, 3), [2**p for p in range(3, 10)]),
    '7b': Figure(100, (64, 64), (3, 3), [2**p for p in range(3, 10)]),
    '7c': Figure(100, (128, 128), (3, 3), [2**p for p in range(3, 10)]),
    '7d': Figure(50, (64, 64), (3, 3), [2**p for p in range(3, 10)]),
    '7e': Figure(100, (64, 64), (1, 1), [2**p for p in range(3, 10)]),
    '7f': Figure(100, (64, 64), (5, 5), [2**p for p in range(3, 10)]),
    '8': Figure(100, (32, 256), (1, 5), [2**p for p in range(3, 11)]),
}
AUTO, COPY = 'auto', 'device copy'
LOOP, TABLES = ', matrix by matrix', ', tables moved'  # endings of names of contenders
# (figure, n_B) -> times over the report's Batched SpMM on a P100 (sections 5.1 and 5.3): of the
# fastest contender that goes matrix by matrix, and of cuBLAS.
HEADLINES = {('6a', 64): (9.27, 1.26), ('6b', 512): (6.09, 1.43), ('8', 1024): (3.29, None)}
CUBLAS = 'cuBLAS fp32 by pointers' + TABLES
# If fewer bytes are moved, a product takes little longer than its launch, which varies by 2 %.
SMALL_BYTES, ALLOWANCE = 1000000, 1.02


def title(name):
    """Return a figure's parameters in words."""
    figure = FIGURES[name]
    dims, nnz = [
        '%d' % low if low == high else '%d to %d' % (low, high)
        for low, high in (figure.dims, figure.nnz_per_row)
    ]
    return 'figure %s: batch %d, dim %s, nnz/row %s' % (name, figure.batch, dims, nnz)


def random_matrices(figure, rng):
    """Return a figure's dense float32 matrices; rows of a matrix have equally many non-zeros."""
    matrices = []
    for _ in range(figure.batch):
        dim, nnz = [rng.randint(low, high + 1) for low, high in (figure.dims, figure.nnz_per_row)]
        columns = rng.rand(dim, dim).argsort(axis=1)[:, :nnz]
        matrix = numpy.zeros((dim, dim), 'f')
        numpy.put_along_axis(matrix, columns, rng.uniform(0.5, 1.5, (dim, nnz)).astype('f'), 1)
        matrices.append(matrix)
    return matrices


def gflops(nnz, n_b, microseconds):
    """Return the rate as in the paper: two operations per non-zero and column, even if dense."""
    return round(2e-3 * nnz * n_b / microseconds, 2)


def ratios(times):
    """Return name -> time of each contender over the time of ``auto``.

    A time that is a small difference of large times may be lost in their noise. If it is not
    positive, it is left out.
    """
    medians = {name: time['median'] for name, time in times.items() if time['median'] > 0}
    if AUTO not in medians:
        return {}
    return {
        name: round(median / medians[AUTO], 4) for name, median in medians.items() if name != AUTO
    }


def geometric_means(points, kind):
    """Return name -> geometric mean of the ratios over the points that the contender ran."""
    logarithms = collections.defaultdict(list)
    for point in points:
        for name, ratio in point['time_over_auto'][kind].items():
            logarithms[name].append(math.log(ratio))
    return {
        name: round(math.exp(sum(values) / len(values)), 3) for name, values in logarithms.items()
    }


def losses(points, kind):
    """Return the points and contenders where ``auto`` is slower (list of dict), worst first.

    A loss is 'allowed' if less than `SMALL_BYTES` are moved and it is within `ALLOWANCE`.
    """
    lost = [
        {
            'figure': point['figure'],
            'n_B': point['n_B'],
            'contender': name,
            'time_over_auto': ratio,
            'allowed': point['bytes'] < SMALL_BYTES and ratio * ALLOWANCE >= 1,
        }
        for point in points
        for name, ratio in point['time_over_auto'][kind].items()
        if ratio < 1 and name != COPY
    ]
    return sorted(lost, key=lambda loss: loss['time_over_auto'])


def headlines(points, kind):
    """Return the report's headline ratios beside measured ones, tables included (list of dict)."""
    found = []
    for point in points:
        report = HEADLINES.get((point['figure'], point['n_B']))
        if report is None:
            continue
        times = {name: time['median'] for name, time in point['microseconds'][kind].items()}
        loop = min(time for name, time in times.items() if name.endswith(LOOP))
        theirs = min(times['swa' + TABLES], times['st' + TABLES])
        row = {'figure': point['figure'], 'n_B': point['n_B']}
        for peer, time, on_p100 in (
            ('matrix by matrix', loop, report[0]),
            (CUBLAS, times.get(CUBLAS), report[1]),
        ):
            if time is not None:
                row['over ' + peer] = {
                    'report, P100': on_p100,
                    'swa or st' + TABLES: round(time / theirs, 2),
                    AUTO: round(time / times[AUTO], 2),
                }
        found.append(row)
    return found
