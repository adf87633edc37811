"""The pictures of a training."""

import pandas
from matplotlib.figure import Figure


def learning_curve(log, path, title, panels):
    """Draw the learning curve; `panels` are (key in the log (list of dict), name of the axis)."""
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout='constrained')
    table = pandas.DataFrame(log)
    for ax, (key, name) in zip(figure.subplots(1, len(panels)), panels):
        for prefix, part, color in (('', 'training', 'C0'), ('validation/', 'validation', 'C1')):
            column = prefix + 'main/' + key
            if column in table:
                ax.plot(table['epoch'], table[column], '.-', label=part, color=color)
        ax.set(xlabel='epoch', ylabel=name, xlim=(0, table['epoch'].max() + 1))
        if key != 'roc_auc':
            ax.set_ylim(0, None)
        ax.locator_params(axis='x', integer=True)
        ax.grid(alpha=0.3)
        ax.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def fit(path, truth, predictions, titles):
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
    figure.savefig(path, dpi=120)
