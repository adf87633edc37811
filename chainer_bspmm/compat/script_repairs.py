"""Repairs for scripts of earlier versions, such as upstream's examples; only under `run`."""

import functools
import importlib.util
import inspect
import sys
import types

from chainer_bspmm.compat.import_hooks import repairs
from chainer_bspmm.compat.user_code import warn

_CHANNELS: dict[str, str | None] = {'hidden_dim': 'hidden_channels'}
_LAYERS: dict[str, str | None] = {**_CHANNELS, 'n_layers': 'n_update_layers'}
_EDGES: dict[str, str | None] = {'num_edge_type': 'n_edge_types'}
# Module of Chainer Chemistry -> class -> keyword before version 0.6 -> keyword since then, or None
# where the argument had no effect. GIN, MPNN and GNNFiLM had the old keywords in development only.
RENAMED: dict[str, dict[str, dict[str, str | None]]] = {
    'chainer_chemistry.models.nfp': {'NFP': _LAYERS},
    'chainer_chemistry.models.ggnn': {'GGNN': {**_LAYERS, **_EDGES}},
    'chainer_chemistry.models.rsgcn': {'RSGCN': _LAYERS},
    'chainer_chemistry.models.relgat': {'RelGAT': _LAYERS},
    'chainer_chemistry.models.relgcn': {
        'RelGCN': {'out_channels': 'out_dim', 'ch_list': 'hidden_channels', **_EDGES}
    },
    'chainer_chemistry.models.schnet': {'SchNet': _LAYERS},
    'chainer_chemistry.models.gin': {'GIN': _LAYERS},
    'chainer_chemistry.models.mpnn': {'MPNN': {**_LAYERS, **_EDGES}},
    'chainer_chemistry.models.gnn_film': {'GNNFiLM': {**_LAYERS, **_EDGES}},
    'chainer_chemistry.links.update.ggnn_update': {'GGNNUpdate': {**_CHANNELS, **_EDGES}},
    'chainer_chemistry.links.update.relgcn_update': {'RelGCNUpdate': _EDGES},
    'chainer_chemistry.links.update.schnet_update': {'SchNetUpdate': _CHANNELS},
    'chainer_chemistry.links.readout.ggnn_readout': {'GGNNReadout': {'hidden_dim': None}},
    'chainer_chemistry.links.readout.nfp_readout': {'NFPReadout': {'out_size': 'out_dim'}},
    'chainer_chemistry.links.readout.schnet_readout': {'SchNetReadout': _CHANNELS},
}


def take_old_keywords(module):
    """Let models and links take the names that arguments had before Chainer Chemistry 0.6."""
    for name, renamed in RENAMED[module.__name__].items():
        kind = getattr(module, name)
        kind.__init__ = taking_old_keywords(name, kind.__init__, renamed)


def taking_old_keywords(name, init, renamed):
    """Wrap the constructor of a class so that it takes old keywords, too, with one warning."""
    parameters = inspect.signature(init).parameters
    # An old keyword that is also a parameter today is passed on as it is.
    renamed = {old: new for old, new in renamed.items() if old not in parameters}
    warn_once = functools.cache(warn)

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        given = [old for old in renamed if old in kwargs]
        for old in given:
            new = renamed[old]
            value = kwargs.pop(old)
            if new is None:
                continue
            if new in kwargs:
                text = '%s.__init__() got multiple values for argument %r: also as %r, its old name'
                raise TypeError(text % (name, new, old))
            kwargs[new] = value
        if given:
            words = ['%s is %s' % (old, renamed[old] or 'gone, and had no effect') for old in given]
            warn_once(
                '%s: since Chainer Chemistry 0.6 %s (docs/migration.md)' % (name, ', '.join(words))
            )
        init(self, *args, **kwargs)

    return __init__


for _module_name in RENAMED:
    repairs(_module_name)(take_old_keywords)


@repairs('chainer.training.updaters.standard_updater')
def updaters_may_set_their_device(module):
    """Let subclasses of updaters assign `device`, which Chainer 7 made a read-only property."""
    warn_once = functools.cache(warn)

    def set_device(self, device):
        warn_once(
            'device: since Chainer 7 it is passed to the constructor of an updater, '
            'super().__init__(..., device=device), not assigned (docs/migration.md)'
        )
        self._device = self._input_device = (
            None if device is None else module.chainer.get_device(device)
        )

    module.StandardUpdater.device = module.StandardUpdater.device.setter(set_device)


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


# network_graph/train_network_graph.py imports distutils.util.strtobool. Python 3.12 has it only if
# setuptools brings it.
if importlib.util.find_spec('distutils') is None:
    sys.modules['distutils'] = distutils = types.ModuleType('distutils')
    sys.modules['distutils.util'] = util = types.ModuleType('distutils.util')
    vars(distutils).update(util=util)
    vars(util).update(strtobool=strtobool)
