"""Draw docs/roofline.png from the stored result of bench_roofline (no GPU needed).

``python -m benchmarks.plot_roofline benchmarks/results/nvidia-h200/roofline.json``
"""

import sys

from matplotlib import ticker

from benchmarks import plots

# rows of a matrix, non-zeros a row -> colour, line, marker
SERIES = {
    (20, 3): (plots.ORANGE, '-', 'o'),
    (50, 3): (plots.BLUE, '-', 's'),
    (128, 3): (plots.GREEN, '-', '^'),
    (50, 2): (plots.SKY, '--', 'v'),
    (50, 1): (plots.BLACK, ':', 'x'),
}
WIDTHS = (16, 64, 256)


def draw(panel, points, n_b, value):
    for (dim, nnz_per_row), (color, line, marker) in SERIES.items():
        here = [
            (point['bytes'] / 1e6, value(point))
            for point in points
            if (point['dim'], point['nnz_per_row'], point['n_B']) == (dim, nnz_per_row, n_b)
        ]
        if here:
            panel.plot(
                *zip(*here),
                color=color,
                linestyle=line,
                marker=marker,
                markersize=4,
                label='%d x %d, %d a row' % (dim, dim, nnz_per_row),
            )
    panel.set_xscale('log')
    panel.xaxis.set_minor_formatter(ticker.NullFormatter())


def main(source):
    result = plots.load(source)
    figure, axes = plots.panels(3, len(WIDTHS), (11, 9), sharey='row')
    for column, n_b in enumerate(WIDTHS):
        for row, l2 in enumerate(('warm', 'cold')):
            panel = axes[row, column]
            draw(
                panel,
                [point for point in result['points'] if point['l2'] == l2],
                n_b,
                lambda point: point['ratio'],
            )
            panel.axhline(1, color='0.6', linewidth=1)
            panel.plot([10, 2000], [1.2, 1.2], color=plots.RED, linewidth=1.5)
            panel.set_xlim(0.07, 3000)
            panel.set_title('n_B = %d, %s L2' % (n_b, l2), fontsize=9)
        small = [
            point for point in result['points'] if point['l2'] == 'warm' and point['bytes'] < 1e6
        ]
        panel = axes[2, column]
        draw(panel, small, n_b, lambda point: point['device_us']['bspmm']['median'])
        copies = sorted(
            (point['bytes'] / 1e6, point['copy_us']) for point in small if point['n_B'] == n_b
        )
        panel.plot(*zip(*copies), color='0.6', linewidth=0, marker='.', label='device copy')
        panel.axhline(2.2, color=plots.RED, linewidth=1.5)
        panel.set_ylim(0, None)
        panel.set_title('n_B = %d, warm L2, under 1 MB' % n_b, fontsize=9)
        panel.set_xlabel('megabytes moved: X, Y and CSR, each once', fontsize=9)
    for row, label in enumerate(
        ('bspmm / device copy', 'bspmm / device copy', 'device microseconds a call')
    ):
        axes[row, 0].set_ylabel(label, fontsize=9)
    figure.legend(
        *axes[2, 0].get_legend_handles_labels(),
        loc='outside upper center',
        ncols=6,
        fontsize=8,
        frameon=False,
        title='bspmm in float32 over the fastest device copy '
        'of as many bytes; red: the bars (1.2 from 10 MB on, 2.2 us under 1 MB)',
    )
    plots.save(figure, result, 'roofline')


if __name__ == '__main__':
    main(sys.argv[1])
