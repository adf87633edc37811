"""Draw docs/captured.png from a stored result of bench_captured (no GPU needed).

``python -m benchmarks.plot_captured benchmarks/results/nvidia-h200/captured.json``
"""
import sys

import numpy

from benchmarks import plots

COLORS = {'upstream dense': plots.ORANGE, 'ours eager': plots.SKY,
          'ours captured': plots.BLUE, 'ours captured, DeviceDataset': plots.BLACK,
          'PyTorch Geometric': plots.GREEN, 'PyTorch Geometric captured': plots.RED}
FASTEST = 'ours captured, DeviceDataset'


def draw(panel, methods, n_batch):
    """Draw a group of bars for every method: milliseconds of a step, a line at the device's."""
    used = [method for method in methods if n_batch in methods[method]['batches']]
    width = 0.84 / len(COLORS)
    for i, (name, color) in enumerate(COLORS.items()):
        for place, method in enumerate(used):
            times = methods[method]['batches'][n_batch]['milliseconds']
            if name not in times:
                continue
            wall, x = times[name]['wall'], place + (i - (len(COLORS) - 1) / 2) * width
            bar = panel.bar(x, wall['median'], width, color=color, label=name,
                            yerr=numpy.array([[wall['median'] - wall['low']],
                                              [wall['high'] - wall['median']]]),
                            error_kw={'linewidth': 0.7})
            if 'device' in times[name]:
                panel.plot([x - width / 2, x + width / 2], [times[name]['device']] * 2,
                           color='white', linewidth=1.5)
            if name == FASTEST and 'upstream dense' in times:
                dense = times['upstream dense']['wall']['median']
                panel.bar_label(bar, ['%.0fx' % (dense / wall['median'])], padding=3,
                                fontsize=7.5, fontweight='bold')
    panel.set_yscale('log')
    panel.set_xticks(range(len(used)), used, fontsize=8)
    panel.tick_params(axis='y', which='both', labelsize=8)


def main(source):
    result = plots.load(source)
    batches = sorted({n_batch for of in result['data'].values()
                      for found in of['methods'].values() for n_batch in found['batches']},
                     key=int)
    figure, axes = plots.panels(len(result['data']), len(batches),
                                (13, 2.9 * len(result['data']) + 0.6))
    for of, panels in zip(result['data'].values(), axes):
        for n_batch, panel in zip(batches, panels):
            draw(panel, of['methods'], n_batch)
            panel.set_title('%s, batch %s' % (of['description'], n_batch), fontsize=9)
        panels[0].set_ylabel('ms a training step\n(white line: of these on the device)',
                             fontsize=9)
    plots.legend(figure, axes, COLORS)
    plots.save(figure, result, 'captured')


if __name__ == '__main__':
    main(*sys.argv[1:])
