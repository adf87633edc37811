"""Code that the examples share.

`arguments`: the command line. `data`: CSV files, SMILES to graphs, splits. `tasks`: regression and
classification, and their models. `training`, `prediction`: the body of train_*.py and predict_*.py.
`folder`: the folder of a run. `ranks`: several processes under mpirun. `pictures`: the learning
curve, predicted against true values.
"""

import os
import signal
import sys


def _end(number, frame):
    """End the program with one line after Ctrl-C: during imports there is nothing to tidy up."""
    os.write(2, b'interrupted\n')
    os._exit(130)


# Imports take seconds; after them training.main handles Ctrl-C. Other programs that import this
# package keep their handler.
_script = os.path.abspath(sys.argv[0])
_examples = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.dirname(os.path.dirname(_script)) == _examples:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)

import chainer_bspmm  # noqa: E402, F401  before Chainer, which it lets import on today's Python
