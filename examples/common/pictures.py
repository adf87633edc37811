"""The pictures of a training."""

import os

import matplotlib
import pandas
from common.data import replacing
from matplotlib.figure import Figure

matplotlib.rcParams['text.parse_math'] = False  # dollars in names of columns are no TeX


def learning_curve(out, log, title, panels):
    """Draw the learning curve into a folder.

    `log`: a list of dict; `panels`: (key in the log, name of the axis) of each panel.
    """
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout='constrained')
    table = pandas.DataFrame(log)
    for ax, (key, name) in zip(figure.subplots(1, len(panels)), panels):
        for prefix, part, color in (('', 'training', 'C0'), ('validation/', 'validation', 'C1')):
            column = prefix + 'main/' + key
            if column in table:
                ax.plot(table['epoch'], table[column], '.-', label=part, color=color)
        bottom = None if key == 'roc_auc' else 0
        ax.set(xlabel='epoch', ylabel=name, xlim=(0, table['epoch'].max() + 1), ylim=(bottom, None))
        ax.locator_params(axis='x', integer=True)
        ax.grid(alpha=0.3)
        ax.legend()
    figure.suptitle(title.encode(errors='backslashreplace').decode())  # it has the name of a file
    with replacing(os.path.join(out, 'learning_curve.png')) as new:
        figure.savefig(new, dpi=120)


def fit(out, truth, predictions, titles):
    """Draw predicted against true values of the test molecules, a panel for each target."""
    n_columns = min(len(titles), 4)
    n_rows = -(-len(titles) // n_columns)
    figure = Figure(figsize=(4 * n_columns, 3.8 * n_rows), layout='constrained')
    for i, (t, y, title) in enumerate(zip(truth.T, predictions.T, titles), 1):
        ax = figure.add_subplot(n_rows, n_columns, i)
        ax.axline((t.mean(), t.mean()), slope=1, color='gray', linewidth=1)
        ax.scatter(t, y, s=8, alpha=0.5)
        ax.set(xlabel='true', ylabel='predicted', title=title)
        ax.grid(alpha=0.3)
    with replacing(os.path.join(out, 'fit.png')) as new:
        figure.savefig(new, dpi=120)
