"""Draw docs/training.png from stored results of bench_training (no GPU needed).

``python -m benchmarks.plot_training benchmarks/results/nvidia-h200/training.json
benchmarks/results/cpu/training.json``, or one of them.
"""
import sys

import numpy

from benchmarks import plots

COLORS = {'upstream dense': plots.ORANGE, 'ours padded': plots.SKY, 'ours packed': plots.BLUE,
          'PyTorch Geometric': plots.GREEN}


def draw(panel, methods, n_batch):
    """Draw a group of bars for every method: milliseconds of a training step with converter."""
    used = [method for method in methods if n_batch in methods[method]['batches']]
    width = 0.8 / len(COLORS)
    for i, (name, color) in enumerate(COLORS.items()):
        for place, method in enumerate(used):
            times = methods[method]['batches'][n_batch]['milliseconds']
            if name not in times:
                continue
            spread = times[name]['training']['with converter']
            bar = panel.bar(
                place + (i - 1.5) * width, spread['median'], width, color=color,
                label=name,
                yerr=numpy.array([[spread['median'] - spread['low']],
                                  [spread['high'] - spread['median']]]),
                error_kw={'linewidth': 0.7})
            if name == 'ours packed' and 'upstream dense' in times:
                dense = times['upstream dense']['training']['with converter']['median']
                panel.bar_label(bar, ['%.1fx' % (dense / spread['median'])], padding=3,
                                fontsize=7.5, fontweight='bold')
    panel.set_yscale('log')
    panel.set_xticks(range(len(used)), used, fontsize=8)
    panel.tick_params(axis='y', which='both', labelsize=8)


def main(*sources):
    results = [plots.load(source) for source in sources]
    rows = [(result, name) for result in results for name in result['data']]
    batches = sorted({n_batch for result, name in rows
                      for found in result['data'][name]['methods'].values()
                      for n_batch in found['batches']}, key=int)
    figure, axes = plots.panels(len(rows), len(batches), (13, 2.6 * len(rows) + 0.6))
    for (result, name), panels in zip(rows, axes):
        where = result['conditions'].get('gpu', 'CPU')
        for n_batch, panel in zip(batches, panels):
            draw(panel, result['data'][name]['methods'], n_batch)
            panel.set_title('%s, %s, batch %s' % (
                where, result['data'][name]['description'], n_batch), fontsize=9)
        panels[0].set_ylabel('ms a training step', fontsize=9)
    plots.legend(figure, axes, COLORS)
    plots.save(figure, results, 'training')


if __name__ == '__main__':
    main(*sys.argv[1:])
