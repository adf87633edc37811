"""What the plots share: reading a stored result, colours, the conditions beneath."""
import json
import pathlib
import textwrap

import matplotlib
matplotlib.use('Agg')
from matplotlib import pyplot  # NOQA: E402

# Okabe and Ito's colours, which people of every kind of sight tell apart.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    '#000000', '#E69F00', '#56B4E9', '#009E73', '#0072B2', '#D55E00', '#CC79A7')

FOLDER = pathlib.Path(__file__).parent.parent / 'docs'


def load(source):
    return json.loads(pathlib.Path(source).read_text())


def panels(n_rows, n_columns, size, **options):
    """Return a figure and its (n_rows, n_columns) axes, without the frame's upper right half."""
    figure, axes = pyplot.subplots(n_rows, n_columns, figsize=size, squeeze=False,
                                   layout='constrained', **options)
    for panel in axes.flat:
        panel.spines[['top', 'right']].set_visible(False)
    return figure, axes


def legend(figure, axes, names):
    """Put one legend above all panels, of those of the names that are drawn, in their order."""
    named = {}
    for panel in axes.flat:
        handles, labels = panel.get_legend_handles_labels()
        named.update(zip(labels, handles))
    labels = [name for name in names if name in named]
    figure.legend([named[name] for name in labels], labels, loc='outside upper center',
                  ncols=len(labels), fontsize=9, frameon=False)


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
            conditions['gpu'], conditions['driver'], cuda, conditions['cupy'])
    else:
        place = '%s, OMP_NUM_THREADS %s, NumPy %s' % (
            conditions['cpu'], conditions['threads'], conditions['numpy'])
    return '%s, Python %s, commit %s, %s' % (
        place, conditions['python'], conditions['commit'], conditions['date'])
