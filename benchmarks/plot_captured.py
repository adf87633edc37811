"""Draw docs/captured.png from a stored result of bench_captured (no GPU needed).

``python -m benchmarks.plot_captured benchmarks/results/nvidia-h200/captured.json``
"""

import sys

from benchmarks import plots

COLORS = {
    'upstream dense': plots.ORANGE,
    'ours eager': plots.SKY,
    'ours captured': plots.BLUE,
    'ours captured, DeviceDataset': plots.BLACK,
    'PyTorch Geometric': plots.GREEN,
    'PyTorch Geometric captured': plots.RED,
}


def draw(panel, methods, n_batch):
    """Draw milliseconds of a step, with a line at those of the device."""
    found = {
        method: of['batches'][n_batch]['milliseconds']
        for method, of in methods.items()
        if n_batch in of['batches']
    }
    places = plots.bars(
        panel,
        {
            method: {name: times['wall'] for name, times in of.items()}
            for method, of in found.items()
        },
        COLORS,
        'ours captured, DeviceDataset',
        'upstream dense',
    )
    for (method, name), ends in places.items():
        if 'device' in found[method][name]:
            panel.plot(ends, [found[method][name]['device']] * 2, color='white', linewidth=1.5)


def main(source):
    result = plots.load(source)
    batches = sorted(
        {
            n_batch
            for of in result['data'].values()
            for found in of['methods'].values()
            for n_batch in found['batches']
        },
        key=int,
    )
    figure, axes = plots.panels(
        len(result['data']), len(batches), (13, 2.9 * len(result['data']) + 0.6)
    )
    for of, panels in zip(result['data'].values(), axes):
        for n_batch, panel in zip(batches, panels):
            draw(panel, of['methods'], n_batch)
            panel.set_title('%s, batch %s' % (of['description'], n_batch), fontsize=9)
        panels[0].set_ylabel('ms a training step\n(white line: of these on the device)', fontsize=9)
    plots.legend(figure, axes, COLORS)
    plots.save(figure, result, 'captured')


if __name__ == '__main__':
    main(*sys.argv[1:])
