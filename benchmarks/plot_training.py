"""Draw docs/training.png from stored results of bench_training (no GPU needed).

``python -m benchmarks.plot_training benchmarks/results/nvidia-h200/training.json
benchmarks/results/cpu/training.json``, or one of them.
"""

import sys

from benchmarks import plots

COLORS = {
    'upstream dense': plots.ORANGE,
    'ours padded': plots.SKY,
    'ours packed': plots.BLUE,
    'PyTorch Geometric': plots.GREEN,
}


def draw(panel, methods, n_batch):
    """Draw milliseconds of a training step with converter."""
    plots.bars(
        panel,
        {
            method: {
                name: times['training']['with converter']
                for name, times in of['batches'][n_batch]['milliseconds'].items()
            }
            for method, of in methods.items()
            if n_batch in of['batches']
        },
        COLORS,
        'ours packed',
        'upstream dense',
    )


def main(*sources):
    results = [plots.load(source) for source in sources]
    rows = [(result, name) for result in results for name in result['data']]
    batches = sorted(
        {
            n_batch
            for result, name in rows
            for found in result['data'][name]['methods'].values()
            for n_batch in found['batches']
        },
        key=int,
    )
    figure, axes = plots.panels(len(rows), len(batches), (13, 2.6 * len(rows) + 0.6))
    for (result, name), panels in zip(rows, axes):
        where = result['conditions'].get('gpu', 'CPU')
        for n_batch, panel in zip(batches, panels):
            draw(panel, result['data'][name]['methods'], n_batch)
            panel.set_title(
                '%s, %s, batch %s' % (where, result['data'][name]['description'], n_batch),
                fontsize=9,
            )
        panels[0].set_ylabel('ms a training step', fontsize=9)
    plots.legend(figure, axes, COLORS)
    plots.save(figure, results, 'training')


if __name__ == '__main__':
    main(*sys.argv[1:])
