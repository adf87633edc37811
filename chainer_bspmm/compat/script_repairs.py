"""Repairs of functions that Chainer Chemistry's example scripts call: only under `run`."""

import functools
import importlib.util
import sys
import types

from chainer_bspmm.compat.import_hooks import repairs


@repairs('matplotlib.axes._axes')
def annotate_takes_s(module):
    """qm9/plot.py, tox21/plot.py, molnet/summary_eval_molnet.py: annotate(s=...) is now text=."""
    annotate = module.Axes.annotate

    @functools.wraps(annotate)
    def annotate_with_s(self, *args, **kwargs):
        if 's' in kwargs:
            kwargs['text'] = kwargs.pop('s')
        return annotate(self, *args, **kwargs)

    module.Axes.annotate = annotate_with_s


def strtobool(text):
    """Act as ``distutils.util.strtobool``: return 1 for yes, 0 for no, else raise ValueError."""
    word = text.lower()
    if word in ('y', 'yes', 't', 'true', 'on', '1'):
        return 1
    if word in ('n', 'no', 'f', 'false', 'off', '0'):
        return 0
    raise ValueError('invalid truth value %r' % word)


# network_graph/train_network_graph.py. Python 3.12 lacks distutils, setuptools may bring it.
if importlib.util.find_spec('distutils') is None:
    sys.modules['distutils'] = distutils = types.ModuleType('distutils')
    sys.modules['distutils.util'] = util = types.ModuleType('distutils.util')
    vars(distutils).update(util=util)
    vars(util).update(strtobool=strtobool)
