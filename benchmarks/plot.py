"""Draw the figures of docs/ from stored results; needs no GPU.

``python -m benchmarks.plot`` draws all figures, ``python -m benchmarks.plot captured FILE.json``
the figure ``captured`` from a file (default: the stored result).
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

from benchmarks.harness import NAMES, ROOT, stored, TITLES  # NOQA: E402
from benchmarks.products.figures import FIGURES, LOOP, TABLES, title  # NOQA: E402
from benchmarks import bench_command  # NOQA: E402
from benchmarks.training import bench_two_lines  # NOQA: E402
from benchmarks.training import step_contenders as steps  # NOQA: E402

FOLDER = ROOT / 'docs'

# Okabe and Ito's colours, which colour-blind readers can tell apart.
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

# Contender -> colour, in the order in which they are drawn.
CAPTURED = {
    steps.UPSTREAM: ORANGE,
    steps.GEOMETRIC: GREEN,
    steps.EAGER: SKY,
    steps.GEOMETRIC_CAPTURED: RED,
    steps.ON_DEVICE: BLUE,
}
JAX = {
    steps.JAX['scan', 'TF32']: GREY,
    steps.JAX['jit', 'TF32']: ORANGE,
    steps.JAX['scan', 'FP32']: GREEN,
    steps.JAX['jit', 'FP32']: SKY,
    steps.PACKED: BLUE,
}
COMMAND = {bench_command.UPSTREAM: ORANGE, bench_command.EAGER: SKY, bench_command.CAPTURED: BLUE}
TWO_LINES = {bench_two_lines.UPSTREAM: ORANGE, bench_two_lines.TWO_LINES: BLUE}
# Names in the legends, where they are not the contenders' own.
SPOKEN = {
    steps.UPSTREAM: 'Chainer Chemistry, dense',
    steps.GEOMETRIC: 'PyTorch Geometric',
    steps.EAGER: 'chainer_bspmm, eager',
    steps.GEOMETRIC_CAPTURED: 'PyTorch Geometric, captured',
    steps.ON_DEVICE: 'chainer_bspmm, captured',
    steps.PACKED: 'chainer_bspmm, captured',
    bench_two_lines.UPSTREAM: 'Chainer Chemistry, dense',
    bench_two_lines.TWO_LINES: 'after the two lines',
    bench_command.CAPTURED: 'chainer_bspmm, captured',
}
INTERVALS = 'Medians of interleaved runs, with the 10th and 90th percentile'

TWO_LINES_DATA = 'Tox21', "QM9's sample"
TWO_LINES_BATCH = '128'
ROOFLINE_COLUMNS = 16, 64, 256
# Rows of a matrix and non-zeros of a row -> colour and style.
ROOFLINE = {
    (20, 3): (ORANGE, 'o-'),
    (50, 3): (BLUE, 's-'),
    (128, 3): (GREEN, '^-'),
    (50, 2): (SKY, 'v--'),
    (50, 1): (BLACK, 'x:'),
}

KIND = 'device, warm L2'  # the kind of time that is drawn for products
CUSPARSE = ['cuSPARSE csr alg%d' % number for number in (1, 2, 3)]
BSR = ['cuSPARSE bsr alg1, blocks of %d' % size for size in (8, 16)]
POINTERS = 'cuBLAS fp32 by pointers'
# Label, colour, style, and names of contenders; the fastest of them is drawn.
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
    """Return a figure and its (n_rows, n_columns) axes, without frames at the top and right."""
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=size, squeeze=False, layout='constrained', **options
    )
    for panel in axes.flat:
        panel.spines[['top', 'right']].set_visible(False)
    return figure, axes


def bars(panel, groups, colors, best, references):
    """Draw a group of bars for every method: medians with their spread, from 0 on.

    `groups`: method -> name -> summary. Bars of `best` are labelled with :func:`times_faster`.
    """
    width = 0.8 / len(colors)
    for i, (name, color) in enumerate(colors.items()):
        for place, group in enumerate(groups.values()):
            if name not in group:
                continue
            x = place + (i - (len(colors) - 1) / 2) * width
            of = group[name]
            spread = [[of['median'] - of['low']], [of['high'] - of['median']]]
            bar = panel.bar(
                x,
                of['median'],
                width,
                color=color,
                label=SPOKEN.get(name, name),
                yerr=spread,
                error_kw={'linewidth': 0.7},
            )
            ratio = times_faster(group, best, references)
            if name == best and ratio is not None:
                panel.bar_label(
                    bar,
                    ['%.1fx' % ratio],
                    padding=3,
                    fontsize=7.5,
                    fontweight='bold',
                    zorder=9,
                    bbox={'facecolor': 'white', 'alpha': 0.8, 'pad': 0.5, 'linewidth': 0},
                )
    panel.set_xticks(range(len(groups)), groups, fontsize=8)
    panel.tick_params(axis='y', labelsize=8)


def points(panel, groups, colors, best, references, text='%.0fx'):
    """Draw a line for every method, on a logarithmic axis: a point and a spread per contender.

    `groups`: method -> name -> summary. Between `best` and the fastest of `references`, a label has
    the ratio of their times; `text`: its format.
    """
    for place, group in enumerate(groups.values()):
        for name, color in colors.items():
            if name not in group:
                continue
            of = group[name]
            panel.plot([of['low'], of['high']], [place, place], color=color, linewidth=1.5)
            label = SPOKEN.get(name, name)
            panel.plot(of['median'], place, 'o', color=color, markersize=6, label=label, zorder=3)
        ratio = times_faster(group, best, references)
        if ratio is not None:
            ends = [group[best]['median'], ratio * group[best]['median']]
            panel.plot(ends, [place, place], color='0.85', linewidth=4, zorder=0)
            panel.annotate(
                text % ratio,
                (numpy.sqrt(ends[0] * ends[1]), place),
                (0, 3),
                textcoords='offset points',
                ha='center',
                va='bottom',
                fontweight='bold',
                fontsize=9,
            )
    panel.set_xscale('log')
    panel.set_yticks(range(len(groups)), groups)
    panel.set_ylim(len(groups) - 0.5, -0.7)  # the first line is at the top, with room for its label
    panel.xaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
    panel.xaxis.set_minor_formatter(ticker.NullFormatter())
    panel.grid(axis='x', color='0.92')
    panel.set_axisbelow(True)
    panel.tick_params(axis='y', length=0)


def times_faster(group, best, references):
    """Return the time of the fastest of `references` over the time of `best`; None if missing."""
    others = [group[name]['median'] for name in references if name in group]
    return min(others) / group[best]['median'] if best in group and others else None


def legend(figure, panels, names=None, n_columns=None, title=None):
    """Put one legend above the figure: all lines of some panels, or `names` in this order."""
    names = names and [SPOKEN.get(name, name) for name in names]
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


def save(figure, result, name, caption):
    """Write docs/<name>.png, with a caption and the conditions of a result beneath."""
    of = result['conditions']
    machine = '{cpu}, NumPy {numpy}'
    if 'gpu' in of:
        cuda = '%d.%d' % (of['cuda'] // 1000, of['cuda'] % 1000 // 10)
        machine = '{gpu}, CUDA %s, CuPy {cupy}' % cuda
    of = {**of, 'commit': of['commit'][:8]}
    machine = (machine + ', Python {python}, commit\N{NO-BREAK SPACE}{commit}, {date}.').format(
        **of
    )
    width = int(figure.get_figwidth() * 15)
    lines = textwrap.wrap('%s. %s' % (caption, machine), width)
    figure.supxlabel('\n'.join(lines), fontsize=7.5, color='0.3')
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
                zorder=2 if order else 3,  # the first line is drawn above all others
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


def step_panels(result, draw, size, *options):
    """Draw a result of bench_steps: a row for each data set, a column for each batch.

    `draw`: `bars` or `points`, with these options. `size`: size of a panel in inches. Returns the
    figure and its panels.
    """
    data = result['data'].values()
    batches = {n for of in data for found in of['methods'].values() for n in found['batches']}
    batches = sorted(batches, key=int)
    width, height = size
    figure, axes = panels(len(data), len(batches), (width * len(batches), height * len(data) + 0.9))
    for of, row in zip(data, axes):
        for n_batch, panel in zip(batches, row):
            groups = {
                TITLES[method]: {
                    name: times['wall']
                    for name, times in found['batches'][n_batch]['milliseconds'].items()
                }
                for method, found in of['methods'].items()
                if n_batch in found['batches']
            }
            draw(panel, groups, *options)
            panel.set_title('%s, batch %s' % (of['description'], n_batch), fontsize=9)
    return figure, axes


def captured(result):
    """Draw captured.png from a result of bench_steps."""
    figure, axes = step_panels(
        result, points, (4.2, 2.6), CAPTURED, steps.ON_DEVICE, [steps.UPSTREAM]
    )
    for panel in axes[-1]:
        panel.set_xlabel('ms a training step', fontsize=9)
    legend(figure, axes.flat, CAPTURED)
    caption = (
        INTERVALS + '. A step with its batch, forward, backward and Adam; 4 layers of 64 units. '
        "chainer_bspmm, captured: from a DeviceDataset. In bold: the dense model's time over that"
    )
    save(figure, result, 'captured', caption)


def jax(result):
    """Draw jax.png from a result of bench_steps against JAX."""
    drivers = [steps.JAX[driver, 'FP32'] for driver in steps.DRIVERS]
    figure, axes = step_panels(result, bars, (4.3, 2.9), JAX, steps.PACKED, drivers)
    for panel in axes[:, 0]:
        panel.set_ylabel('ms a training step', fontsize=9)
    legend(figure, axes.flat, JAX)
    caption = (
        INTERVALS + '. 4 layers of 64 units, dropout, Adam. In bold: the time of the faster of '
        "JAX's jit and scan in FP32 over that of chainer_bspmm, packed, from a DeviceDataset"
    )
    save(figure, result, 'jax', caption)


def command(result):
    """Draw command.png from a result of bench_command: seconds, with caches and without."""
    figure, axes = panels(1, 2, (11, 3.6), sharey=True)
    for panel, kind in zip(axes.flat, ('warm', 'cold')):
        groups = {}
        for data, of_data in result['data'].items():
            for method, of in of_data['methods'].items():
                groups['%s, %s' % (NAMES[data], TITLES[method])] = {
                    name: _spread([run['seconds'] for run in kinds[kind]['runs']])
                    for name, kinds in of.items()
                    if kind in kinds
                }
        points(panel, groups, COMMAND, bench_command.CAPTURED, [bench_command.UPSTREAM], '%.1fx')
        title = {'warm': 'caches of a run before', 'cold': 'empty caches'}[kind]
        panel.set_title(title, fontsize=9)
        panel.set_xlabel('seconds from the command to the saved model', fontsize=9)
    legend(figure, axes.flat, COMMAND)
    caption = (
        'Medians, with the fastest and the slowest run; 20 epochs with validation. In bold: the '
        "dense model's time over that of captured steps. The page says which are extrapolated"
    )
    save(figure, result, 'command', caption)


def two_lines(result):
    """Draw two_lines.png from a result of bench_two_lines: milliseconds an epoch."""
    rows = [(data, methods) for data, methods in result['data'].items() if len(methods) > 2]
    figure, axes = panels(1, len(TWO_LINES_DATA), (8.3, 3.1), sharey=True)
    for name, panel in zip(TWO_LINES_DATA, axes.flat):
        (methods,) = [methods for data, methods in rows if data.startswith(name)]
        groups = {
            TITLES[method]: {
                name: {key: 1e3 * value for key, value in of.items()}
                for name, of in cells[TWO_LINES_BATCH]['seconds an epoch'].items()
            }
            for method, cells in methods.items()
        }
        points(panel, groups, TWO_LINES, bench_two_lines.TWO_LINES, [bench_two_lines.UPSTREAM])
        panel.set_title(name, fontsize=11)
        panel.set_xlabel('ms an epoch', fontsize=10)
    legend(figure, axes.flat, TWO_LINES)
    caption = (
        INTERVALS + ". Epochs of Chainer Chemistry's run_train, the second and later, validation "
        'included; batches of %s, 4 layers of 64 units, Adam' % TWO_LINES_BATCH
    )
    save(figure, result, 'two_lines', caption)


def roofline(result):
    """Draw roofline.png from a result of an earlier version: time of a product over a copy's."""
    figure, axes = panels(2, len(ROOFLINE_COLUMNS), (11, 6), sharex=True, sharey='row')
    for cache, row in zip(('warm', 'cold'), axes):
        for n_columns, panel in zip(ROOFLINE_COLUMNS, row):
            for (size, n_entries), (color, style) in ROOFLINE.items():
                found = [
                    (point['bytes'] / 1e6, point['ratio'])
                    for point in result['points']
                    if (point['dim'], point['nnz_per_row']) == (size, n_entries)
                    and point['n_B'] == n_columns
                    and point['l2'] == cache
                ]
                label = '%d rows, %d in each' % (size, n_entries)
                panel.plot(*zip(*sorted(found)), style, color=color, markersize=4, label=label)
            panel.axhline(1, color='0.5', linewidth=0.8)
            panel.set_xscale('log')
            panel.xaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
            panel.set_title('%d columns, %s L2 cache' % (n_columns, cache), fontsize=9)
        row[0].set_ylabel("time over the copy's", fontsize=9)
    for panel in axes[-1]:
        panel.set_xlabel('MB: X, Y and the CSR arrays', fontsize=9)
    legend(figure, axes.flat)
    caption = (
        'Device time of bspmm in float32, of a batch of square matrices of so many rows with so '
        'many non-zeros in each, over that of the fastest '
        'copy of as many bytes, which is the line at 1; medians of 12 interleaved replays. Warm: '
        'every call has the same arrays. Cold: calls take turns over more arrays than the cache '
        'holds'
    )
    save(figure, result, 'roofline', caption)


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
        title = 'batches of %s molecules for each GPU, measured and modelled' % n_batch
        panel.set_title(title, fontsize=9)
    axes[0, 0].set_ylabel('efficiency', fontsize=9)
    legend(figure, axes.flat)
    caption = (
        'Weak scaling: the time of a step on one GPU over that on so many, each with its own '
        'batch. Points: measured on one host. Dashed: modelled, as the page says'
    )
    save(figure, result, 'scaling', caption)


def _spread(values):
    return {'median': statistics.median(values), 'low': min(values), 'high': max(values)}


DRAWN = {
    draw.__name__: draw for draw in (figures, roofline, captured, jax, command, two_lines, scaling)
}


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
