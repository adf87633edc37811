"""Draw docs/host.png from the stored result of bench_host (no GPU needed).

``python -m benchmarks.plot_host benchmarks/results/nvidia-h200/host.json``
"""

import sys

from benchmarks import plots


def draw(panel, times, colors):
    """Draw a bar for every name -> microseconds."""
    bars = panel.barh(list(times), list(times.values()), color=colors)
    panel.bar_label(bars, ['%.2f' % value for value in times.values()], padding=3, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(min(0, *times.values()), max(times.values()) * 1.15)
    panel.tick_params(axis='y', labelsize=8)
    panel.set_xlabel('host microseconds a call', fontsize=9)


def main(source):
    result = plots.load(source)
    figure, axes = plots.panels(1, 2, (13, 4))
    parts = {name: times['median'] for name, times in result['parts_of_backend_bspmm_us'].items()}
    beyond = result['beyond_the_parts_us']
    draw(axes[0, 0], {**parts, **beyond}, [plots.BLUE] * len(parts) + ['0.6'] * len(beyond))
    whole = {name: times['median'] for name, times in result['host_us'].items()}
    axes[0, 0].set_title(
        'the parts of backend.bspmm: %.1f in all' % whole['backend.bspmm'], fontsize=9
    )
    draw(axes[0, 1], whole, [plots.GREEN if 'bspmm' in name else plots.ORANGE for name in whole])
    axes[0, 1].axvline(12, color=plots.RED, linewidth=1.5, zorder=0)
    axes[0, 1].set_title('whole calls; red: 12, the bar of backend.bspmm', fontsize=9)
    plots.save(figure, result, 'host')


if __name__ == '__main__':
    main(sys.argv[1])
