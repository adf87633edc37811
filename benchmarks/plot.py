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

from benchmarks.harness import NAMES, ROOT, stored, TITLES  # NOQA: E402
from benchmarks.products.figures import FIGURES, LOOP, TABLES, title  # NOQA: E402
from benchmarks import bench_command  # NOQA: E402
from benchmarks.tables import WIDTHS  # NOQA: E402
from benchmarks.training import bench_two_lines, bench_widths  # NOQA: E402
from benchmarks.training import step_contenders as steps  # NOQA: E402

FOLDER = ROOT / 'docs'
# Inches of every figure, which a page shows at 830 pixels: type of 8 points has 11 pixels.
WIDTH = 8.3
CAPTION = 128  # characters in a line of the caption

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
BY_WIDTH = {
    bench_widths.UPSTREAM_S['FP32']: ORANGE,
    bench_widths.OURS['FP32']: BLUE,
    bench_widths.OURS['TF32']: SKY,
}
# Names in the legends, where they are not the contenders' own.
SPOKEN = {
    steps.UPSTREAM: 'Chainer Chemistry, dense',
    steps.GEOMETRIC: 'PyTorch Geometric',
    steps.EAGER: 'chainer_bspmm, eager',
    steps.GEOMETRIC_CAPTURED: 'PyTorch Geometric, captured',
    steps.ON_DEVICE: 'chainer_bspmm, captured',
    steps.PACKED: 'chainer_bspmm, captured',
    bench_widths.OURS['TF32']: 'chainer_bspmm, captured, in TF32',
    bench_two_lines.UPSTREAM: 'Chainer Chemistry, dense',
    bench_two_lines.TWO_LINES: 'after the two lines',
    bench_command.CAPTURED: 'chainer_bspmm, captured',
}
INTERVALS = 'Medians of interleaved runs, with the 10th and 90th percentiles'

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
PRODUCTS_CAPTION = (
    'GFLOP/s: 2 nnz n_B over the median device time of a replayed CUDA graph, whose arrays stay in '
    'the L2 cache; float32'
)
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
    ('cuBLAS batched, TF32 (figure 8: padded)', SKY, 'p--', ['cuBLAS tf32', 'cuBLAS tf32, padded']),
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


def panels(n_rows, n_columns, height, **options):
    """Return a figure and its (n_rows, n_columns) axes, without frames at the top and right.

    All figures have the width of a page, so that their type has the size that is set here.
    """
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=(WIDTH, height), squeeze=False, layout='constrained', **options
    )
    for panel in axes.flat:
        panel.spines[['top', 'right']].set_visible(False)
        panel.tick_params(labelsize=8)
    return figure, axes


def points(panel, groups, colors, best, references, ratio='%.0fx', apart=0.0):
    """Draw a line for every method: for each contender a point, with its spread.

    `groups`: method -> name -> summary. Behind each line stands the time of the fastest of
    `references` over that of `best`, in the format `ratio`. `apart`: how far the points of one
    method are above each other.
    """
    for i, (name, color) in enumerate(colors.items()):
        for place, group in enumerate(groups.values()):
            if name in group:
                of = group[name]
                y = place + (i - (len(colors) - 1) / 2) * apart
                face = 'white' if of.get('is_extrapolated') else color
                panel.plot([of['low'], of['high']], [y, y], color=color, linewidth=1.4)
                panel.plot(of['median'], y, 'o', color=color, markerfacecolor=face, markersize=5)
        panel.plot([], [], 'o', color=color, label=SPOKEN.get(name, name))
    for place, group in enumerate(groups.values()):
        times = times_faster(group, best, references)
        if times is not None:
            panel.annotate(
                ratio % times,
                (1.02, place),
                xycoords=('axes fraction', 'data'),
                va='center',
                fontweight='bold',
                fontsize=8.5,
                annotation_clip=False,
            )
    panel.set_yticks(range(len(groups)), groups, fontsize=9)
    panel.set_ylim(len(groups) - 0.5, -0.5)  # the first line is at the top
    panel.grid(axis='x', color='0.9')
    panel.set_axisbelow(True)
    panel.tick_params(axis='y', length=0)


def log_axis(panel):
    """Make the horizontal axis logarithmic, with plain numbers at its ticks."""
    panel.set_xscale('log')
    panel.xaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
    panel.xaxis.set_minor_formatter(ticker.NullFormatter())


def times_faster(group, best, references):
    """Return the time of the fastest of `references` over the time of `best`; None if missing."""
    others = [group[name]['median'] for name in references if name in group]
    return min(others) / group[best]['median'] if best in group and others else None


def legend(figure, panels, n_columns=None):
    """Put one legend of everything in these panels above all."""
    named = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named.update(zip(labels, handles))
    figure.legend(
        named.values(),
        named.keys(),
        loc='outside upper center',
        ncols=n_columns or len(named),
        fontsize=8.5,
        frameon=False,
        columnspacing=1.2,
        handletextpad=0.4,
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
    lines = textwrap.wrap('%s. %s' % (caption, machine), CAPTION)
    figure.supxlabel('\n'.join(lines), fontsize=7.5, color='0.3')
    target = FOLDER / (name + '.png')
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
    print('wrote', target)


def products(result, lines, name, method=''):
    """Draw the report's figures from a result of bench_figures."""
    figure, axes = panels(3, 3, 8.8)
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
        panel.set_title(title(key).replace(': ', '\n'), fontsize=8.5)
        panel.set_xticks(shape.n_b, [str(n) for n in shape.n_b])
        panel.tick_params(labelsize=7.5)
    for panel in axes[-1]:
        panel.set_xlabel('n_B', fontsize=9)
    for panel in axes[:, 0]:
        panel.set_ylabel('GFLOP/s', fontsize=9)
    legend(figure, axes.flat, n_columns=2)
    save(figure, result, name, PRODUCTS_CAPTION + method)


def figures(result):
    products(result, PRODUCTS, 'figures')
    moved = '. Tables moved: every call copies each from pinned memory, asynchronously'
    products(result, PRODUCTS_WITH_TABLES, 'figures_tables', moved)


def step_panels(result, colors, best, references, ratio):
    """Draw a result of bench_steps: a row for each data set, a column for each batch.

    Arguments are those of `points`. Returns the figure and its panels.
    """
    data = result['data'].values()
    batches = {n for of in data for found in of['methods'].values() for n in found['batches']}
    batches = sorted(batches, key=int)
    n_lines = sum(len(of['methods']) for of in data)
    height = 0.9 + 0.5 * len(data) + 0.36 * n_lines
    figure, axes = panels(len(data), len(batches), height, sharex='col', sharey='row')
    for of, row in zip(data, axes):
        name = of['description'].removesuffix(' in this repository')
        for n_batch, panel in zip(batches, row):
            groups = {}
            for method, found in of['methods'].items():
                cell = found['batches'].get(n_batch, {'milliseconds': {}})
                groups[TITLES[method]] = {
                    name: times['wall'] for name, times in cell['milliseconds'].items()
                }
            points(panel, groups, colors, best, references, ratio, apart=0.14)
            panel.set_title('%s, batch %s' % (name, f'{int(n_batch):,}'), fontsize=9)
    for panel in axes[-1]:
        panel.set_xlabel('ms a training step', fontsize=9)
    legend(figure, axes.flat, n_columns=3)
    return figure, axes


def captured(result):
    """Draw captured.png from a result of bench_steps."""
    figure, axes = step_panels(result, CAPTURED, steps.ON_DEVICE, [steps.UPSTREAM], '%.0fx')
    for panel in axes.flat:
        log_axis(panel)
    caption = (
        INTERVALS + '. A step with its batch, forward, backward and Adam; 4 layers of 64 units. '
        'chainer_bspmm, captured: from a DeviceDataset. In bold: the time of Chainer '
        "Chemistry's dense model over that"
    )
    save(figure, result, 'captured', caption)


def jax(result):
    """Draw jax.png from a result of bench_steps against JAX."""
    drivers = [steps.JAX[driver, 'FP32'] for driver in steps.DRIVERS]
    figure, axes = step_panels(result, JAX, steps.PACKED, drivers, '%.1fx')
    for panel in axes.flat:
        panel.set_xlim(left=0)
    caption = (
        INTERVALS + '. 4 layers of 64 units, dropout, Adam. In bold: the time of the faster of '
        "JAX's jit and scan in FP32 over that of chainer_bspmm, packed, from a DeviceDataset"
    )
    save(figure, result, 'jax', caption)


def command(result):
    """Draw command.png from a result of bench_command: seconds, with caches and without."""
    figure, axes = panels(1, 2, 2.7, sharex=True, sharey=True)
    for panel, kind in zip(axes.flat, (bench_command.WARM, bench_command.COLD)):
        groups = {}
        for data, of_data in result['data'].items():
            for method, of in of_data['methods'].items():
                groups['%s, %s' % (NAMES[data], TITLES[method])] = {
                    name: {
                        **_spread([run['seconds'] for run in kinds[kind]['runs']]),
                        'is_extrapolated': kinds[kind]['is_extrapolated'],
                    }
                    for name, kinds in of.items()
                    if kind in kinds
                }
        points(panel, groups, COMMAND, bench_command.CAPTURED, [bench_command.UPSTREAM], '%.1fx')
        log_axis(panel)
        title = {bench_command.WARM: 'caches of a run before', bench_command.COLD: 'empty caches'}
        panel.set_title(title[kind], fontsize=9)
        panel.set_xlabel('seconds from the command to the saved model', fontsize=9)
    legend(figure, axes.flat)
    caption = (
        'Medians, with the fastest and the slowest run; 20 epochs with validation. Hollow: '
        "extrapolated from a shorter run. In bold: the dense model's time over that of captured "
        'steps'
    )
    save(figure, result, 'command', caption)


def two_lines(result):
    """Draw two_lines.png from a result of bench_two_lines: milliseconds an epoch."""
    figure, axes = panels(1, len(TWO_LINES_DATA), 2.8, sharex=True, sharey=True)
    for name, panel in zip(TWO_LINES_DATA, axes.flat):
        (methods,) = [of for data, of in result['data'].items() if data.startswith(name)]
        groups = {
            TITLES[method]: {
                name: {key: 1e3 * value for key, value in of.items()}
                for name, of in cells[TWO_LINES_BATCH]['seconds an epoch'].items()
            }
            for method, cells in methods.items()
        }
        points(panel, groups, TWO_LINES, bench_two_lines.TWO_LINES, [bench_two_lines.UPSTREAM])
        log_axis(panel)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel('ms an epoch', fontsize=9)
    legend(figure, axes.flat)
    caption = (
        INTERVALS + ". Epochs of Chainer Chemistry's run_train, the second and later, validation "
        'included; batches of %s, 4 layers of 64 units, Adam. In bold: times as fast'
        % TWO_LINES_BATCH
    )
    save(figure, result, 'two_lines', caption)


def widths(result):
    """Draw widths.png from a result of bench_widths: a step of 128 molecules, for two widths."""
    figure, axes = panels(1, len(WIDTHS), 2.9, sharex=True, sharey=True)
    measured = {method for units in WIDTHS for method in result['data'][units]}
    methods = [method for method in TITLES if method in measured]
    for units, panel in zip(WIDTHS, axes.flat):
        groups = {}
        for method in methods:
            batches = result['data'][units].get(method, {'batches': {}})['batches']
            times = batches.get('128', {'milliseconds': {}})['milliseconds']
            groups[TITLES[method]] = {name: found['wall'] for name, found in times.items()}
        ours, upstream = bench_widths.OURS['FP32'], bench_widths.UPSTREAM_S['FP32']
        points(panel, groups, BY_WIDTH, ours, [upstream], apart=0.12)
        log_axis(panel)
        panel.set_title('%s units' % units, fontsize=10)
        panel.set_xlabel('ms a training step', fontsize=9)
    legend(figure, axes.flat)
    caption = (
        INTERVALS + '. Steps of 128 molecules of Tox21, with batch, forward, backward and Adam; '
        "chainer_bspmm: packed, from a DeviceDataset. In bold: the dense model's time over that "
        'in FP32'
    )
    save(figure, result, 'widths', caption)


def roofline(result):
    """Draw roofline.png from a result of an earlier version: time of a product over a copy's."""
    figure, axes = panels(2, len(ROOFLINE_COLUMNS), 5.2, sharex=True, sharey='row')
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
            log_axis(panel)
            panel.set_title('%d columns, %s L2 cache' % (n_columns, cache), fontsize=9)
        row[0].set_ylabel("time over the copy's", fontsize=9)
    for panel in axes[-1]:
        panel.set_xlabel('MB: X, Y and the CSR arrays', fontsize=9)
    legend(figure, axes.flat)
    caption = (
        'Device time of bspmm in float32, for a batch of square matrices with so many rows and so '
        'many non-zeros in each row, over that of the fastest copy of as many bytes (grey line); '
        'medians of 12 interleaved replays. Warm: every call has the same arrays. Cold: calls '
        'take turns over more arrays than the cache holds'
    )
    save(figure, result, 'roofline', caption)


def scaling(result):
    """Draw scaling.png from a result of bench_scaling: efficiency, measured and modelled."""
    summary = result['summary']
    batches = list(next(iter(summary.values()))['weak'])
    figure, axes = panels(1, len(batches), 3.0, sharey=True)
    styles = (BLACK, 'o'), (ORANGE, 's'), (SKY, '^'), (GREEN, 'v'), (BLUE, 'D'), (RED, 'P')
    for panel, n_batch in zip(axes.flat, batches):
        for i, ((method, of), (color, marker)) in enumerate(zip(summary.items(), styles)):
            shares = {int(n): share for n, share in of['weak'][n_batch].items()}
            modelled = {
                1: 1.0,
                **{n: of['modelled'] for n, of in shares.items() if 'modelled' in of},
            }
            panel.plot(*zip(*sorted(modelled.items())), '--', color=color, linewidth=1)
            for n, share in shares.items():
                if 'measured' in share:
                    # Points of the methods stand beside each other, for they would hide each other.
                    x = n * 2 ** (0.12 * (i - (len(summary) - 1) / 2))
                    panel.plot(x, share['measured'], marker, color=color, markersize=5)
            panel.plot([], [], marker + '--', color=color, markersize=5, label=TITLES[method])
        panel.set_xscale('log', base=2)
        panel.set_xticks(sorted({1, *shares}), sorted({1, *shares}))
        panel.xaxis.set_minor_locator(ticker.NullLocator())
        panel.set_xlabel('GPUs', fontsize=9)
        panel.grid(axis='y', color='0.9')
        panel.set_title('batches of %s for each GPU' % f'{int(n_batch):,}', fontsize=9)
    axes[0, 0].set_ylabel('efficiency', fontsize=9)
    legend(figure, axes.flat)
    caption = (
        'Weak scaling: the time of a step on one GPU over that on so many, each with its own '
        'batch. Points: measured on one host, side by side at each number of GPUs. Dashed lines: '
        'modelled'
    )
    save(figure, result, 'scaling', caption)


def _spread(values):
    return {'median': statistics.median(values), 'low': min(values), 'high': max(values)}


DRAWN = {
    draw.__name__: draw
    for draw in (figures, roofline, captured, jax, command, two_lines, widths, scaling)
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
