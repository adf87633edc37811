"""Draw docs/sell.png from the stored result of bench_sell (no GPU needed).

``python -m benchmarks.plot_sell benchmarks/results/nvidia-h200/sell.json``
"""

import sys

import numpy

from benchmarks import plots

COLUMNS = 3
MARKERS = 'osD^v*P'


def gflops(case, us):
    return 2 * case['nnz'] / us['median'] / 1e3


def draw_slices(panel, case):
    """Draw GFLOP/s over the slice size, and our CSR and cuSPARSE beside it."""
    times = case['spmv_device_us']
    for sort_rows, color, line in ((False, plots.BLUE, '-o'), (True, plots.SKY, '--s')):
        here = [
            (slicing['slice_size'], gflops(case, times[slicing['name']]))
            for slicing in case['slicings']
            if slicing['sorted'] == sort_rows
        ]
        panel.plot(
            *zip(*here),
            line,
            color=color,
            markersize=4,
            label='our SELL' + ', rows sorted' * sort_rows,
        )
    panel.axhline(gflops(case, times['csr']), color=plots.GREEN, label='our CSR')
    by_csr = [name for name in times if name.startswith('cusparse csr')]
    panel.axhline(
        max(gflops(case, times[name]) for name in by_csr),
        color=plots.RED,
        linestyle='-.',
        label='cuSPARSE CSR, better algorithm',
    )
    sliced = [
        (int(name.split()[-1]), gflops(case, times[name]))
        for name in times
        if name.startswith('cusparse sell')
    ]
    panel.plot(*zip(*sliced), 'x', color=plots.BLACK, label='cuSPARSE SELL')
    panel.set_xscale('log', base=2)
    panel.set_ylim(0, None)
    largest = {slicing['sorted']: slicing for slicing in case['slicings']}
    panel.set_title(
        '%s: %d rows, %.3g a row\nstored / non-zeros at S = %d: %.3g, sorted %.3g'
        % (
            case['name'],
            case['rows'],
            case['nnz'] / case['rows'],
            largest[False]['slice_size'],
            largest[False]['padding_ratio'],
            largest[True]['padding_ratio'],
        ),
        fontsize=8,
    )
    panel.set_xlabel('slice size S', fontsize=8)
    panel.set_ylabel('GFLOP/s, float64', fontsize=8)


def draw_percent(panel, result):
    """Draw our best SELL as a percentage of the best of cuSPARSE, and what the paper had."""
    names = list(dict.fromkeys(case['name'] for case in result['cases']))
    for shift, dtype, color in ((-0.2, 'float64', plots.BLUE), (0.2, 'float32', plots.ORANGE)):
        percent = [
            case['percent_of_cusparse']['sell']
            for case in result['cases']
            if case['dtype'] == dtype
        ]
        places = numpy.arange(len(names)) + shift
        panel.barh(places, percent, 0.38, color=color, label='our SELL, ' + dtype)
        percent = [
            case['percent_of_cusparse']['csr'] for case in result['cases'] if case['dtype'] == dtype
        ]
        panel.plot(
            percent,
            places,
            'd',
            color=plots.BLACK,
            markersize=3.5,
            label='our CSR' if dtype == 'float64' else None,
        )
    paper = result['summary_percent']['paper']
    panel.axvline(100, color='0.6', linewidth=1)
    panel.axvline(
        paper['mean'],
        color=plots.RED,
        label="the paper's SELL, mean %(mean)d\n(%(worst)d to %(best)d)" % paper,
    )
    panel.axvspan(paper['worst'], paper['best'], color=plots.RED, alpha=0.1)
    panel.set_xlim(0, 250)  # room for the legend
    panel.set_yticks(range(len(names)), names, fontsize=7)
    panel.invert_yaxis()
    panel.legend(fontsize=6.5, loc='lower right', frameon=False)
    panel.set_title(
        'y = A x: the speed of our best SELL and of our CSR,\npercent of the best of cuSPARSE',
        fontsize=8,
    )


def draw_widths(panel, result):
    """Draw how many times faster than our CSR our best SELL is, over the columns of X."""
    colors = plots.BLACK, plots.ORANGE, plots.SKY, plots.GREEN, plots.BLUE, plots.RED, '0.5'
    cases = [case for case in result['cases'] if case['dtype'] == 'float32']
    for case, color, marker in zip(cases, colors, MARKERS):
        gains = []
        for n_b, times in case['bspmm_device_us'].items():
            best = min(us['median'] for name, us in times.items() if name != 'csr')
            gains.append((int(n_b), times['csr']['median'] / best))
        panel.plot(*zip(*gains), color=color, marker=marker, markersize=4, label=case['name'])
    panel.axhline(1, color='0.6', linewidth=1)
    panel.set_xscale('log', base=2)
    panel.set_xticks([1, 2, 4, 8], ['1', '2', '4', '8'])
    panel.set_ylim(0, 1.4 * panel.get_ylim()[1])  # room for the legend
    panel.set_xlabel('columns of X, n_B', fontsize=8)
    panel.legend(fontsize=6, frameon=False, loc='upper left', ncols=2)
    panel.set_title('Y = A X in float32: time of our CSR\nover that of our best SELL', fontsize=8)


def main(source):
    result = plots.load(source)
    doubles = [case for case in result['cases'] if case['dtype'] == 'float64']
    n_rows = -(-(len(doubles) + 2) // COLUMNS)
    figure, axes = plots.panels(n_rows, COLUMNS, (11, 3 * n_rows))
    places = list(axes.flat)
    for panel, case in zip(places, doubles):
        draw_slices(panel, case)
    figure.legend(
        *places[0].get_legend_handles_labels(),
        loc='outside upper center',
        ncols=5,
        fontsize=8,
        frameon=False,
    )
    draw_percent(places[len(doubles)], result)
    draw_widths(places[len(doubles) + 1], result)
    for panel in places[len(doubles) + 2 :]:
        panel.remove()
    plots.save(figure, result, 'sell')


if __name__ == '__main__':
    main(sys.argv[1])
