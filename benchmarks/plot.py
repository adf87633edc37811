"""Draw the figures of docs/ from stored results; needs no GPU.

``python -m benchmarks.plot`` draws all of them, ``python -m benchmarks.plot roofline FILE.json``
one figure from a result file (default: that in ``benchmarks/results``).
"""

import argparse
import json
import pathlib
import statistics
import textwrap

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot  # NOQA: E402
from matplotlib import ticker  # NOQA: E402
import numpy  # NOQA: E402

from benchmarks.harness import number, RESULTS, ROOT, TITLES  # NOQA: E402
from benchmarks.training import bench_two_lines  # NOQA: E402
from benchmarks.products.figures import FIGURES, LOOP, TABLES, title  # NOQA: E402

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


def panels(n_rows, n_columns, size, **options):
    """Return a figure and its (n_rows, n_columns) axes, without a frame above and on the right."""
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=size, squeeze=False, layout='constrained', **options
    )
    for panel in axes.flat:
        panel.spines[['top', 'right']].set_visible(False)
    return figure, axes


def bars(panel, groups, colors, best, reference):
    """Draw a group of bars for every method: medians with their spread, on a logarithmic axis.

    Args:
        groups (dict): method -> name -> {'median', 'low', 'high'}.
        colors (dict): name -> colour, in the order of the bars.
        best, reference (str): the bars of `best` are labelled with their speed over `reference`.

    Returns:
        dict: (method, name) -> where its bar begins and ends.
    """
    width, places = 0.8 / len(colors), {}
    for i, (name, color) in enumerate(colors.items()):
        for place, (method, group) in enumerate(groups.items()):
            if name not in group:
                continue
            spread, x = group[name], place + (i - (len(colors) - 1) / 2) * width
            places[method, name] = x - width / 2, x + width / 2
            bar = panel.bar(
                x,
                spread['median'],
                width,
                color=color,
                label=name,
                yerr=numpy.array(
                    [[spread['median'] - spread['low']], [spread['high'] - spread['median']]]
                ),
                error_kw={'linewidth': 0.7},
            )
            if name == best and reference in group:
                ratio = group[reference]['median'] / spread['median']
                panel.bar_label(
                    bar,
                    ['%.1fx' % ratio],
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


def save(figure, results, name, method=None):
    """Write docs/<name>.png, with method and conditions beneath, and print its path.

    Args:
        results (list of dict): what is drawn: one benchmark, on one or several machines.
        method (str or None): None means that of the first result.
    """
    beneath = '%s. %s.' % (method or results[0]['method'], '; '.join(map(_machine, results)))
    width = int(figure.get_figwidth() * 16)
    figure.supxlabel('\n'.join(textwrap.wrap(beneath, width)), fontsize=7.5, color='0.3')
    target = FOLDER / (name + '.png')
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
    print('wrote', target)


def _machine(result):
    conditions = result['conditions']
    if 'gpu' in conditions:
        cuda = '%d.%d' % (conditions['cuda'] // 1000, conditions['cuda'] % 1000 // 10)
        place = '%s, driver %s, CUDA %s, CuPy %s' % (
            conditions['gpu'],
            conditions['driver'],
            cuda,
            conditions['cupy'],
        )
    else:
        place = '%s, OMP_NUM_THREADS %s, NumPy %s' % (
            conditions['cpu'],
            conditions['threads'],
            conditions['numpy'],
        )
    return '%s, Python %s, commit %s, %s' % (
        place,
        conditions['python'],
        conditions['commit'],
        conditions['date'],
    )


KIND = 'device, warm L2'  # time of the figures
# Label, colour, marker, line style, and the contenders of which the fastest is drawn.
FIGURES_LINES = [
    ('bspmm (ours)', RED, 'o', '-', ['auto']),
    ('report, CSR', BLACK, 's', '-', ['swa']),
    ('report, ST', '#999999', 'v', '-', ['st']),
    (
        'cuBLAS batched, FP32 (figure 8: padded)',
        BLUE,
        'D',
        '-',
        ['cuBLAS fp32', 'cuBLAS fp32, padded', 'cuBLAS fp32 by pointers'],
    ),
    (
        'cuBLAS batched, TF32 (figure 8: padded)',
        SKY,
        'D',
        '--',
        ['cuBLAS tf32', 'cuBLAS tf32, padded'],
    ),
    (
        'cuSPARSE, block-diagonal (best algorithm, PyTorch included)',
        GREEN,
        '^',
        '-',
        [
            'cuSPARSE csr alg1',
            'cuSPARSE csr alg2',
            'cuSPARSE csr alg3',
            'cuSPARSE bsr alg1, blocks of 8',
            'cuSPARSE bsr alg1, blocks of 16',
            'torch.sparse.mm',
        ],
    ),
    (
        'message passing (best of Chainer, PyTorch Geometric)',
        PURPLE,
        'P',
        '-',
        ['F.sparse_matmul', 'PyTorch Geometric'],
    ),
    (
        'matrix by matrix (best of cuSPARSE, TensorFlow)',
        ORANGE,
        'x',
        ':',
        [
            name + LOOP
            for name in (
                'TensorFlow',
                'cuSPARSE csr alg1',
                'cuSPARSE csr alg2',
                'cuSPARSE csr alg3',
            )
        ],
    ),
]
FIGURES_TABLES_LINES = [
    ('bspmm (ours): no tables', RED, 'o', '-', ['auto']),
    ('report, CSR: 6 tables moved', BLACK, 's', '-', ['swa' + TABLES]),
    ('report, ST: 6 tables moved', '#999999', 'v', '-', ['st' + TABLES]),
    ('cuBLAS gemmBatched: 3 tables moved', BLUE, 'D', '-', ['cuBLAS fp32 by pointers' + TABLES]),
    ('report, CSR: tables not counted', BLACK, 's', ':', ['swa']),
    ('report, ST: tables not counted', '#999999', 'v', ':', ['st']),
    ('cuBLAS gemmBatched: tables not counted', BLUE, 'D', ':', ['cuBLAS fp32 by pointers']),
]


def figures(result):
    """Draw figures.png and figures_tables.png from a result of bench_figures."""
    method = 'float32; %s, CUDA graph replay, median; GFLOP/s = 2 nnz n_B / time' % KIND
    _draw_figures(result, FIGURES_LINES, 'figures', method)
    method += '; tables moved: one pinned asynchronous copy a table in every call'
    _draw_figures(result, FIGURES_TABLES_LINES, 'figures_tables', method)


def _draw_figures(result, lines, name, method):
    figure, axes = panels(3, 3, (11, 10))
    for panel, (key, shape) in zip(axes.flat, FIGURES.items()):
        points = [point for point in result['points'] if point['figure'] == key]
        for order, (label, color, marker, style, contenders) in enumerate(lines):
            best = []
            for point in points:
                rates = point['gflops'][KIND]
                found = [rates[contender] for contender in contenders if contender in rates]
                if found:
                    best.append((point['n_B'], max(found)))
            panel.plot(
                *(zip(*best) if best else ([], [])),
                style,
                color=color,
                marker=marker,
                markersize=4,
                linewidth=1.2 if order else 2,
                label=label,
                zorder=2 if order else 3,
            )  # the first above all others
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
    save(figure, [result], name, method)


TRAINING_COLORS = {
    'upstream dense': ORANGE,
    'ours padded': SKY,
    'ours packed': BLUE,
    'ours folded': BLACK,
    'PyTorch Geometric': GREEN,
}
CAPTURED_COLORS = {
    'upstream dense': ORANGE,
    'ours eager': SKY,
    'ours captured': BLUE,
    'ours captured, DeviceDataset': BLACK,
    'ours captured, DeviceDataset, packed': PURPLE,
    'PyTorch Geometric': GREEN,
    'PyTorch Geometric captured': RED,
}


def training(*results):
    """Draw training.png from results of bench_training, of one or several machines."""
    rows = [
        ('%s, ' % result['conditions'].get('gpu', 'CPU'), of)
        for result in results
        for of in result['data'].values()
    ]
    figure, axes, cells = _step_panels(rows, 2.6, 'ms a training step')
    for panel, groups in cells:
        times = {
            method: {name: found['training']['with converter'] for name, found in group.items()}
            for method, group in groups.items()
        }
        # Runs from before there were folded batches have none.
        is_folded = any('ours folded' in group for group in groups.values())
        best = 'ours folded' if is_folded else 'ours packed'
        bars(panel, times, TRAINING_COLORS, best, 'upstream dense')
    legend(figure, axes.flat, TRAINING_COLORS)
    save(figure, results, 'training')


def _walls(groups):
    """Return method -> name -> milliseconds a step (a summary)."""
    return {
        method: {name: found['wall'] for name, found in group.items()}
        for method, group in groups.items()
    }


def captured(result):
    """Draw captured.png and README's speed.png from a result of bench_captured."""
    rows = [('', of) for of in result['data'].values()]
    label = 'ms a training step\n(white line: of these on the device)'
    figure, axes, cells = _step_panels(rows, 2.9, label)
    for panel, groups in cells:
        times = _walls(groups)
        best = 'ours captured, DeviceDataset'
        places = bars(panel, times, CAPTURED_COLORS, best, 'upstream dense')
        for (method, name), ends in places.items():
            if 'device' in groups[method][name]:
                device = groups[method][name]['device']
                panel.plot(ends, [device] * 2, color='white', linewidth=1.5)
    legend(figure, axes.flat, CAPTURED_COLORS, n_columns=4)
    save(figure, [result], 'captured')
    _draw_speed(result)


SPEED = {  # from top to bottom
    'upstream dense': ('Chainer Chemistry, padded dense', ORANGE),
    'ours eager': ('after sparsify', SKY),
    'PyTorch Geometric captured': ('PyTorch Geometric, captured in a CUDA graph', '0.6'),
    'ours captured, DeviceDataset': ('GraphUpdater and DeviceDataset', BLUE),
}


def _draw_speed(result):
    """Draw milliseconds a step of Tox21 at batch 128, as bars with their values."""
    methods = result['data']['tox21']['methods']
    figure, axes = panels(1, 1, (10, 4.2))
    panel = axes[0, 0]
    height = 0.8 / len(SPEED)
    for i, (name, (label, color)) in enumerate(SPEED.items()):
        values = {
            place: of['batches']['128']['milliseconds'][name]['wall']['median']
            for place, of in enumerate(methods.values())
            if name in of['batches']['128']['milliseconds']
        }
        places = [place + (i - (len(SPEED) - 1) / 2) * height for place in values]
        drawn = panel.barh(places, values.values(), 0.9 * height, color=color, label=label)
        panel.bar_label(drawn, [number(value) for value in values.values()], padding=4, fontsize=9)
    panel.set_yticks(range(len(methods)), [TITLES[method] for method in methods], fontsize=10)
    panel.invert_yaxis()
    panel.set_xscale('log')
    panel.set_xlim(0.05, 100)
    panel.xaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
    panel.set_xlabel('milliseconds per training step, logarithmic')
    legend(figure, [panel], n_columns=2)
    save(figure, [result], 'speed', 'Tox21, batches of 128, 64 units, float32, Adam; medians')


JAX_COLORS = {
    'JAX scan, TF32': '#999999',
    'JAX jit, TF32': ORANGE,
    'JAX scan, FP32': GREEN,
    'JAX jit, FP32': SKY,
    'ours captured': BLUE,
    'ours captured, DeviceDataset': BLACK,
    'ours captured, DeviceDataset, packed': PURPLE,
}


def jax(result):
    """Draw jax.png from a result of bench_captured against JAX."""
    rows = [('', of) for of in result['data'].values()]
    label = 'ms a training step\n(labels: JAX in FP32 over ours)'
    figure, axes, cells = _step_panels(rows, 2.9, label)
    for panel, groups in cells:
        times = _walls(groups)
        for group in times.values():
            drivers = [name for name in ('JAX jit, FP32', 'JAX scan, FP32') if name in group]
            if drivers:  # the bars say by how much ours is faster than the better one
                group[BEST] = min((group[name] for name in drivers), key=lambda of: of['median'])
        bars(panel, times, JAX_COLORS, 'ours captured, DeviceDataset, packed', BEST)
        panel.set_yscale('linear')
    legend(figure, axes.flat, JAX_COLORS, n_columns=4)
    save(figure, [result], 'jax')


BEST = "the better one of JAX's two in FP32"

COMMAND_COLORS = {'upstream dense': ORANGE, 'ours eager': SKY, 'ours captured': BLUE}


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
        places = bars(panel, groups, COMMAND_COLORS, 'ours captured', 'upstream dense')
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
    legend(figure, axes.flat, COMMAND_COLORS)
    method = result['method'] + '. Hatched: of an earlier commit, or extrapolated'
    save(figure, [result], 'command', method)


TWO_LINES_COLORS = {
    bench_two_lines.UPSTREAM: ORANGE,
    bench_two_lines.TWO_LINES: BLUE,
    bench_two_lines.MORE_LINES: BLACK,
}


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
            bars(
                panel, groups, TWO_LINES_COLORS, bench_two_lines.TWO_LINES, bench_two_lines.UPSTREAM
            )
            panel.set_title('%s, batch %s' % (data, n_batch), fontsize=9)
        row[0].set_ylabel('ms an epoch', fontsize=9)
    legend(figure, axes.flat, TWO_LINES_COLORS)
    method = (
        "Epochs of Chainer Chemistry's run_train with validation, the second and later; 4 layers "
        'of 64 units, Adam; medians of interleaved runs, with the 10th and 90th percentile'
    )
    save(figure, [result], 'two_lines', method)


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
    save(figure, [result], 'scaling')


def _spread(values):
    return {'median': statistics.median(values), 'low': min(values), 'high': max(values)}


def _step_panels(rows, height, label):
    """Return a figure and its axes: a row for each (prefix, data set), a column for each batch.

    Also a list of (panel, method -> name -> times).
    """
    batches = sorted(
        {key for _, of in rows for found in of['methods'].values() for key in found['batches']},
        key=int,
    )
    figure, axes = panels(len(rows), len(batches), (13, height * len(rows) + 0.6))
    cells = []
    for (prefix, of), row in zip(rows, axes):
        for n_batch, panel in zip(batches, row):
            groups = {
                method: found['batches'][n_batch]['milliseconds']
                for method, found in of['methods'].items()
                if n_batch in found['batches']
            }
            cells.append((panel, groups))
            panel.set_title('%s%s, batch %s' % (prefix, of['description'], n_batch), fontsize=9)
        row[0].set_ylabel(label, fontsize=9)
    return figure, axes, cells


DRAWN = {
    draw.__name__: (draw, places)
    for draw, places in (
        (figures, ['nvidia-h200']),
        (training, ['nvidia-h200', 'cpu']),
        (captured, ['nvidia-h200']),
        (jax, ['nvidia-h200']),
        (command, ['nvidia-h200']),
        (two_lines, ['nvidia-h200']),
        (scaling, ['nvidia-h200']),
    )
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('name', nargs='?', choices=DRAWN, help='default: all')
    parser.add_argument('files', nargs='*', type=pathlib.Path, help='results to draw')
    args = parser.parse_args(argv)
    for name in [args.name] if args.name else DRAWN:
        draw, places = DRAWN[name]
        files = args.files or [RESULTS / place / (name + '.json') for place in places]
        if not args.name and not all(path.exists() for path in files):
            print('not stored:', name)
            continue
        draw(*(json.loads(path.read_text()) for path in files))


if __name__ == '__main__':
    main()
