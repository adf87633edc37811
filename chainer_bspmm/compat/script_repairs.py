"""A repair for what the example scripts of Chainer Chemistry call themselves: only under `run`."""

import functools

from chainer_bspmm.compat.hooks import repairs


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
