"""What the plots share: reading a stored result, colours, the conditions beneath."""

import json
import pathlib
import textwrap

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot  # NOQA: E402
import numpy  # NOQA: E402

# Okabe and Ito's colours, which people of every kind of sight tell apart.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    '#000000',
    '#E69F00',
    '#56B4E9',
    '#009E73',
    '#0072B2',
    '#D55E00',
    '#CC79A7',
)

FOLDER = pathlib.Path(__file__).parent.parent / 'docs'


def load(source):
    return json.loads(pathlib.Path(source).read_text())


def panels(n_rows, n_columns, size, **options):
    """Return a figure and its (n_rows, n_columns) axes, without the frame's upper right half."""
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
        best, reference (str): over the bars of `best` is said how many times faster they are.

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


def legend(figure, axes, names):
    """Put one legend above all panels, of those of the names that are drawn, in their order."""
    named = {}
    for panel in axes.flat:
        handles, labels = panel.get_legend_handles_labels()
        named.update(zip(labels, handles))
    labels = [name for name in names if name in named]
    figure.legend(
        [named[name] for name in labels],
        labels,
        loc='outside upper center',
        ncols=len(labels),
        fontsize=9,
        frameon=False,
    )


def save(figure, results, name):
    """Write docs/<name>.png, with method and conditions beneath, and print its path.

    Args:
        results (dict or list of dict): what is drawn; several are from one benchmark on several
            machines.
    """
    results = results if isinstance(results, list) else [results]
    beneath = '%s. %s.' % (results[0]['method'], '; '.join(map(_machine, results)))
    width = int(figure.get_figwidth() * 16)
    figure.supxlabel('\n'.join(textwrap.wrap(beneath, width)), fontsize=7.5, color='0.3')
    target = FOLDER / (name + '.png')
    figure.savefig(target, dpi=150)
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
