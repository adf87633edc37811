"""What the examples share.

`data`: CSV files, SMILES to graphs, splits. `tasks`: regression and classification, and their
models. `training`, `prediction`: the body of train_*.py and predict_*.py. `files`: the folder of a
run. `measure`: seconds per step, memory. `ranks`: several processes under mpirun. `arguments`: the
command line.
"""

import sys

_show_traceback = sys.excepthook


def _show_error(kind, error, traceback):
    """Print one line for Ctrl-C, which comes during the imports, too; they take seconds."""
    if issubclass(kind, KeyboardInterrupt):
        print('interrupted', file=sys.stderr)
    else:
        _show_traceback(kind, error, traceback)


sys.excepthook = _show_error
