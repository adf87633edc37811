"""Draw docs/figures.png and docs/figures_tables.png from the stored result of bench_figures.

``python -m benchmarks.plot_figures benchmarks/results/nvidia-h200/figures.json`` (no GPU needed).
"""

import sys

from matplotlib import pyplot
from matplotlib import ticker

from benchmarks import figures
from benchmarks import plots
from benchmarks.figures import LOOP, TABLES

KIND = 'device, warm L2'
# Label, colour, marker, line style, and the contenders of which the fastest is drawn.
LINES = [
    ('bspmm (ours)', plots.RED, 'o', '-', ['auto']),
    ('report, CSR', plots.BLACK, 's', '-', ['swa']),
    ('report, ST', '#999999', 'v', '-', ['st']),
    (
        'cuBLAS batched, FP32 (figure 8: padded)',
        plots.BLUE,
        'D',
        '-',
        ['cuBLAS fp32', 'cuBLAS fp32, padded', 'cuBLAS fp32 by pointers'],
    ),
    (
        'cuBLAS batched, TF32 (figure 8: padded)',
        plots.SKY,
        'D',
        '--',
        ['cuBLAS tf32', 'cuBLAS tf32, padded'],
    ),
    (
        'cuSPARSE, block-diagonal (best algorithm, PyTorch included)',
        plots.GREEN,
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
        plots.PURPLE,
        'P',
        '-',
        ['F.sparse_matmul', 'PyTorch Geometric'],
    ),
    (
        'matrix by matrix (best of cuSPARSE, TensorFlow)',
        plots.ORANGE,
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
TABLE_LINES = [
    ('bspmm (ours): no tables', plots.RED, 'o', '-', ['auto']),
    ('report, CSR: 6 tables moved', plots.BLACK, 's', '-', ['swa' + TABLES]),
    ('report, ST: 6 tables moved', '#999999', 'v', '-', ['st' + TABLES]),
    (
        'cuBLAS gemmBatched: 3 tables moved',
        plots.BLUE,
        'D',
        '-',
        ['cuBLAS fp32 by pointers' + TABLES],
    ),
    ('report, CSR: tables not counted', plots.BLACK, 's', ':', ['swa']),
    ('report, ST: tables not counted', '#999999', 'v', ':', ['st']),
    ('cuBLAS gemmBatched: tables not counted', plots.BLUE, 'D', ':', ['cuBLAS fp32 by pointers']),
]


def draw(result, lines, target, caption):
    figure, panels = pyplot.subplots(3, 3, figsize=(11, 10))
    for panel, name in zip(panels.flat, figures.FIGURES):
        points = [point for point in result['points'] if point['figure'] == name]
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
        panel.set_title(figures.title(name), fontsize=9)
        panel.set_xticks(figures.FIGURES[name].n_b, [str(n) for n in figures.FIGURES[name].n_b])
        panel.tick_params(labelsize=8)
        panel.spines[['top', 'right']].set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel('n_B', fontsize=9)
    for panel in panels[:, 0]:
        panel.set_ylabel('GFLOP/s', fontsize=9)
    figure.legend(
        *panels.flat[0].get_legend_handles_labels(),
        loc='upper center',
        ncol=2,
        fontsize=9,
        frameon=False,
    )
    figure.text(0.01, 0.005, caption % result['conditions'], fontsize=8, color='0.3')
    figure.tight_layout(rect=(0, 0.035, 1, 0.89))
    figure.savefig(target, dpi=120)
    print('wrote', target)


def main(source):
    result = plots.load(source)
    conditions = (
        '%(gpu)s, driver %(driver)s, CuPy %(cupy)s, %(date)s, commit %(commit)s; '
        'float32; device time, CUDA graph replay, warm L2, median; '
        'GFLOP/s = 2 nnz n_B / time'
    )
    draw(result, LINES, plots.FOLDER / 'figures.png', conditions)
    draw(
        result,
        TABLE_LINES,
        plots.FOLDER / 'figures_tables.png',
        conditions + ';\ntables moved: one pinned asynchronous copy a table in every call',
    )


if __name__ == '__main__':
    main(sys.argv[1])
