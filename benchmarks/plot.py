"""Draw the figures of docs/ from stored results; needs no GPU.

``python -m benchmarks.plot`` draws all of them, ``python -m benchmarks.plot captured FILE.json``
those of one result (default: `harness.stored`).
"""

import argparse
import json
import pathlib
import statistics
import textwrap

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot, ticker  # NOQA: E402
import numpy  # NOQA: E402

from benchmarks.harness import ROOT, stored, TITLES  # NOQA: E402
from benchmarks.products.figures import FIGURES, LOOP, TABLES, title  # NOQA: E402
from benchmarks import bench_command  # NOQA: E402
from benchmarks.training import bench_two_lines  # NOQA: E402
from benchmarks.training import step_contenders as steps  # NOQA: E402

FOLDER = ROOT / 'docs'

# Okabe and Ito's colours, which are safe for colour-blind readers.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    '#000000',
    '#E69F00',
    '#56B4E9',
    '#009E73',
    '#0072B2',
    '#D55E00',
    '#CC79A7',
)
GREY = '#999999'

# Contender -> colour, in the order of the bars.
CAPTURED = {
    steps.UPSTREAM: ORANGE,
    steps.EAGER: SKY,
    steps.CAPTURED: BLUE,
    steps.ON_DEVICE: BLACK,
    steps.PACKED: PURPLE,
    steps.GEOMETRIC: GREEN,
    steps.GEOMETRIC_CAPTURED: RED,
}
JAX = {
    steps.JAX['scan', 'TF32']: GREY,
    steps.JAX['jit', 'TF32']: ORANGE,
    steps.JAX['scan', 'FP32']: GREEN,
    steps.JAX['jit', 'FP32']: SKY,
    steps.CAPTURED: BLUE,
    steps.ON_DEVICE: BLACK,
    steps.PACKED: PURPLE,
}
COMMAND = {bench_command.UPSTREAM: ORANGE, bench_command.EAGER: SKY, bench_command.CAPTURED: BLUE}
TWO_LINES = {
    bench_two_lines.UPSTREAM: ORANGE,
    bench_two_lines.TWO_LINES: BLUE,
    bench_two_lines.MORE_LINES: BLACK,
}

KIND = 'device, warm L2'  # time of the products
CUSPARSE = ['cuSPARSE csr alg%d' % number for number in (1, 2, 3)]
BSR = ['cuSPARSE bsr alg1, blocks of %d' % size for size in (8, 16)]
POINTERS = 'cuBLAS fp32 by pointers'
# Label, colour, style, and the contenders of which the fastest is drawn.
PRODUCTS = [
    ('bspmm (ours)', RED, 'o-', ['auto']),
    ('report, CSR', BLACK, 's-', ['swa']),
    ('report, ST', GREY, 'v-', ['st']),
    (
        'cuBLAS batched, FP32 (figure 8: padded)',
        BLUE,
        'D-',
        ['cuBLAS fp32', 'cuBLAS fp32, padded', POINTERS],
    ),
    ('cuBLAS batched, TF32 (figure 8: padded)', SKY, 'D--', ['cuBLAS tf32', 'cuBLAS tf32, padded']),
    (
        'cuSPARSE, block-diagonal (best algorithm, PyTorch included)',
        GREEN,
        '^-',
        [*CUSPARSE, *BSR, 'torch.sparse.mm'],
    ),
    (
        'message passing (best of Chainer, PyTorch Geometric)',
        PURPLE,
        'P-',
        ['F.sparse_matmul', 'PyTorch Geometric'],
    ),
    (
        'matrix by matrix (best of cuSPARSE, TensorFlow)',
        ORANGE,
        'x:',
        [name + LOOP for name in ('TensorFlow', *CUSPARSE)],
    ),
]
PRODUCTS_WITH_TABLES = [
    ('bspmm (ours): no tables', RED, 'o-', ['auto']),
    ('report, CSR: 6 tables moved', BLACK, 's-', ['swa' + TABLES]),
    ('report, ST: 6 tables moved', GREY, 'v-', ['st' + TABLES]),
    ('cuBLAS gemmBatched: 3 tables moved', BLUE, 'D-', [POINTERS + TABLES]),
    ('report, CSR: tables not counted', BLACK, 's:', ['swa']),
    ('report, ST: tables not counted', GREY, 'v:', ['st']),
    ('cuBLAS gemmBatched: tables not counted', BLUE, 'D:', [POINTERS]),
]


def panels(n_rows, n_columns, size, **options):
    """Return a figure and its (n_rows, n_columns) axes, without a frame above and on the right."""
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=size, squeeze=False, layout='constrained', **options
    )
    for panel in axes.flat:
        panel.spines[['top', 'right']].set_visible(False)
    return figure, axes


def bars(panel, groups, colors, best, references):
    """Draw a group of bars for every method: medians with their spread, on a logarithmic axis.

    groups: method -> name -> summary. Bars of `best` are labelled with how many times faster they
    are than the fastest of `references`. Returns (method, name) -> where its bar begins and ends.
    """
    width = 0.8 / len(colors)
    places = {}
    for i, (name, color) in enumerate(colors.items()):
        for place, (method, group) in enumerate(groups.items()):
            if name not in group:
                continue
            median = group[name]['median']
            x = place + (i - (len(colors) - 1) / 2) * width
            places[method, name] = x - width / 2, x + width / 2
            bar = panel.bar(
                x,
                median,
                width,
                color=color,
                label=name,
                yerr=numpy.array([[median - group[name]['low']], [group[name]['high'] - median]]),
                error_kw={'linewidth': 0.7},
            )
            others = [group[other]['median'] for other in references if other in group]
            if name == best and others:
                panel.bar_label(
                    bar,
                    ['%.1fx' % (min(others) / median)],
                    padding=3,
                    fontsize=7.5,
                    fontweight='bold',
                    zorder=9,
                    bbox={'facecolor': 'white', 'alpha': 0.8, 'pad': 0.5, 'linewidth': 0},
                )
    panel.set_yscale('log')
    panel.set_xticks(range(len(groups)), groups, fontsize=8)
    panel.tick_params(axis='y', which='both', labelsize=8)
    return places


def legend(figure, panels, names=None, n_columns=None, title=None):
    """Put one legend of some panels above all: of everything drawn there, or `names` in order."""
    named = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named.update(zip(labels, handles))
    labels = [name for name in names or named if name in named]
    figure.legend(
        [named[name] for name in labels],
        labels,
        loc='outside upper center',
        ncols=n_columns or len(labels),
        fontsize=9 if names else 8,
        frameon=False,
        title=title,
    )


def save(figure, result, name, method=None):
    """Write docs/<name>.png, with method (default: the result's) and conditions beneath."""
    of = result['conditions']
    machine = '{cpu}, NumPy {numpy}'
    if 'gpu' in of:
        cuda = '%d.%d' % (of['cuda'] // 1000, of['cuda'] % 1000 // 10)
        machine = '{gpu}, driver {driver}, CUDA %s, CuPy {cupy}' % cuda
    machine = (machine + ', Python {python}, commit {commit}, {date}.').format(**of)
    beneath = '%s. %s' % (method or result['method'], machine)
    width = int(figure.get_figwidth() * 16)
    figure.supxlabel('\n'.join(textwrap.wrap(beneath, width)), fontsize=7.5, color='0.3')
    target = FOLDER / (name + '.png')
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
    print('wrote', target)


def products(result, lines, name, method=''):
    """Draw the report's figures from a result of bench_figures."""
    figure, axes = panels(3, 3, (11, 10))
    for panel, (key, shape) in zip(axes.flat, FIGURES.items()):
        points = [point for point in result['points'] if point['figure'] == key]
        for order, (label, color, style, contenders) in enumerate(lines):
            best = {}
            for point in points:
                rates = point['gflops'][KIND]
                found = [rates[contender] for contender in contenders if contender in rates]
                if found:
                    best[point['n_B']] = max(found)
            panel.plot(
                list(best),
                list(best.values()),
                style,
                color=color,
                markersize=4,
                linewidth=1.2 if order else 2,
                label=label,
                zorder=2 if order else 3,  # the first above all others
            )
        panel.set_xscale('log', base=2)
        panel.set_yscale('log')
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.set_title(title(key), fontsize=9)
        panel.set_xticks(shape.n_b, [str(n) for n in shape.n_b])
        panel.tick_params(labelsize=8)
    for panel in axes[-1]:
        panel.set_xlabel('n_B', fontsize=9)
    for panel in axes[:, 0]:
        panel.set_ylabel('GFLOP/s', fontsize=9)
    legend(figure, axes.flat, [line[0] for line in lines], n_columns=2)
    beneath = 'float32; %s, CUDA graph replay, median; GFLOP/s = 2 nnz n_B / time' % KIND
    save(figure, result, name, beneath + method)


def figures(result):
    products(result, PRODUCTS, 'figures')
    moved = '; tables moved: one pinned asynchronous copy a table in every call'
    products(result, PRODUCTS_WITH_TABLES, 'figures_tables', moved)


def step_panels(result, colors, best, references, label):
    """Draw a result of bench_steps: a row for each data set, a column for each batch.

    Returns the figure, and a list of (panel, method -> name -> times, what `bars` returned).
    """
    data = result['data'].values()
    batches = {n for of in data for found in of['methods'].values() for n in found['batches']}
    batches = sorted(batches, key=int)
    figure, axes = panels(len(data), len(batches), (13, 2.9 * len(data) + 0.6))
    cells = []
    for of, row in zip(data, axes):
        for n_batch, panel in zip(batches, row):
            groups = {
                method: found['batches'][n_batch]['milliseconds']
                for method, found in of['methods'].items()
                if n_batch in found['batches']
            }
            walls = {
                method: {name: times['wall'] for name, times in group.items()}
                for method, group in groups.items()
            }
            cells.append((panel, groups, bars(panel, walls, colors, best, references)))
            panel.set_title('%s, batch %s' % (of['description'], n_batch), fontsize=9)
        row[0].set_ylabel('ms a training step\n(%s)' % label, fontsize=9)
    legend(figure, axes.flat, colors, n_columns=4)
    return figure, cells


def captured(result):
    """Draw captured.png from a result of bench_steps."""
    label = 'white line: of these on the device'
    figure, cells = step_panels(result, CAPTURED, steps.ON_DEVICE, [steps.UPSTREAM], label)
    for panel, groups, places in cells:
        for (method, name), ends in places.items():
            if 'device' in groups[method][name]:
                device = groups[method][name]['device']
                panel.plot(ends, [device] * 2, color='white', linewidth=1.5)
    save(figure, result, 'captured')


def jax(result):
    """Draw jax.png from a result of bench_steps against JAX."""
    drivers = [steps.JAX[driver, 'FP32'] for driver in steps.DRIVERS]
    label = 'labels: JAX in FP32 over ours'
    figure, cells = step_panels(result, JAX, steps.PACKED, drivers, label)
    for panel, _, _ in cells:
        panel.set_yscale('linear')
    save(figure, result, 'jax')


def command(result):
    """Draw command.png from a result of bench_command: seconds, for warm and empty caches."""
    figure, axes = panels(1, 2, (11, 3.6), sharey=True)
    for panel, kind in zip(axes.flat, ('warm', 'cold')):
        groups = {}
        for data, of_data in result['data'].items():
            for method, of in of_data['methods'].items():
                groups['%s %s' % (data, method)] = {
                    name: _spread([run['seconds'] for run in kinds[kind]['runs']])
                    for name, kinds in of.items()
                    if kind in kinds
                }
        places = bars(panel, groups, COMMAND, bench_command.CAPTURED, [bench_command.UPSTREAM])
        for (group, name), (start, end) in places.items():
            data, method = group.split()
            found = result['data'][data]['methods'][method][name]
            if 'commit' in found or found[kind].get('is_extrapolated'):
                height = groups[group][name]['median']
                panel.bar(start, height, end - start, align='edge', fill=False, hatch='///')
        panel.set_title(
            {'warm': 'caches of a run before', 'cold': 'empty caches'}[kind], fontsize=9
        )
    axes[0, 0].set_ylabel('seconds to the saved model', fontsize=9)
    legend(figure, axes.flat, COMMAND)
    method = result['method'] + '. Hatched: of an earlier commit, or extrapolated'
    save(figure, result, 'command', method)


def two_lines(result):
    """Draw two_lines.png from a result of bench_two_lines: milliseconds an epoch."""
    rows = [(data, methods) for data, methods in result['data'].items() if len(methods) > 2]
    batches = ('32', '128')
    figure, axes = panels(len(rows), len(batches), (11, 2.6 * len(rows) + 0.6), sharey='row')
    for (data, methods), row in zip(rows, axes):
        for n_batch, panel in zip(batches, row):
            groups = {
                TITLES[method]: {
                    name: {key: 1e3 * value for key, value in of.items()}
                    for name, of in cells[n_batch]['seconds an epoch'].items()
                }
                for method, cells in methods.items()
            }
            bars(panel, groups, TWO_LINES, bench_two_lines.TWO_LINES, [bench_two_lines.UPSTREAM])
            panel.set_title('%s, batch %s' % (data, n_batch), fontsize=9)
        row[0].set_ylabel('ms an epoch', fontsize=9)
    legend(figure, axes.flat, TWO_LINES)
    method = (
        "Epochs of Chainer Chemistry's run_train with validation, the second and later; 4 layers "
        'of 64 units, Adam; medians of interleaved runs, with the 10th and 90th percentile'
    )
    save(figure, result, 'two_lines', method)


def scaling(result):
    """Draw scaling.png from a result of bench_scaling: efficiency, measured and modelled."""
    summary = result['summary']
    batches = list(next(iter(summary.values()))['weak'])
    figure, axes = panels(1, len(batches), (11, 3.6), sharey=True)
    colors = BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE
    for panel, n_batch in zip(axes.flat, batches):
        for (method, of), color in zip(summary.items(), colors):
            shares = {int(n): share for n, share in of['weak'][n_batch].items()}
            for kind, style in (('modelled', '--'), ('measured', 'o-')):
                known = {1: 1.0, **{n: of[kind] for n, of in shares.items() if kind in of}}
                label = TITLES[method] if kind == 'measured' else None
                panel.plot(*zip(*sorted(known.items())), style, color=color, label=label)
        panel.set_xscale('log', base=2)
        panel.set_xticks(sorted({1, *shares}), sorted({1, *shares}), fontsize=8)
        panel.set_xlabel('GPUs', fontsize=9)
        panel.set_ylim(0, 1.05)
        panel.set_title('batches of %s molecules for each GPU' % n_batch, fontsize=9)
    axes[0, 0].set_ylabel('efficiency (dashed: modelled)', fontsize=9)
    legend(figure, axes.flat)
    save(figure, result, 'scaling')


def _spread(values):
    return {'median': statistics.median(values), 'low': min(values), 'high': max(values)}


DRAWN = {draw.__name__: draw for draw in (figures, captured, jax, command, two_lines, scaling)}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('name', nargs='?', choices=DRAWN, help='default: all')
    parser.add_argument('file', nargs='?', type=pathlib.Path, help='the result to draw')
    args = parser.parse_args(argv)
    for name in [args.name] if args.name else DRAWN:
        path = args.file or stored(name)
        if args.name or path.exists():
            DRAWN[name](json.loads(path.read_text()))
        else:
            print('not stored:', name)


if __name__ == '__main__':
    main()
