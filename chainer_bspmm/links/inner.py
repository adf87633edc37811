"""Layers of a swapped link that are not called: which classes they may have, and the refusal.

A sparse link computes with the parameters of its linear layers, GRUs and norms, as part of larger
nodes. The code of a layer does not run then, so it must be the code that the node stands for: of a
class that is known, as it was when this package was imported. `sparsify` refuses others with their
path. Where one is put into a link later, or a class is patched, the next call does.
"""

from typing import Any, NoReturn

from chainer import ChainList, functions, links
from chainer_chemistry.links import EmbedAtomID, GraphBatchNormalization, GraphLinear, GraphMLP
from chainer_chemistry.links.readout.set2set import Set2Set
from chainer_chemistry.models import mlp
from chainer_chemistry.models.gwm import gwm

LINEAR = (GraphLinear, links.Linear)
NORMS = (GraphBatchNormalization, links.BatchNormalization)
TABLES = (EmbedAtomID, links.EmbedID)

# Class of a layer -> its own layers that are not called either, as `Sparse.inner_layers`.
INSIDE: dict[type, dict[str, tuple[type, ...]]] = {
    links.GRU: dict.fromkeys(('W', 'W_r', 'W_z', 'U', 'U_r', 'U_z'), LINEAR),
    GraphMLP: {'layers': LINEAR},
    mlp.MLP: {'layers': LINEAR, 'l_out': LINEAR},
    Set2Set: {'lstm_layer': (links.NStepLSTM,)},
    gwm.SuperNodeTransmitterUnit: {},
    gwm.GraphTransmitterUnit: {'V_super': LINEAR, 'B': LINEAR},
    gwm.WarpGateUnit: {'H': LINEAR, 'G': LINEAR},
}

# Functions that work along axis 1: rows have their channels there, upstream's arrays their atoms.
ALONG_AXIS_1 = (functions.softmax, functions.log_softmax, functions.normalize, functions.crelu)

REMEDY = (
    "Unswapped, with upstream's converter, the model runs as it is: "
    'python -m chainer_bspmm run SCRIPT.py'
)


class UnknownLayer(ValueError):
    """A layer whose code would not run."""


def calls_of(kind: Any) -> tuple:
    """Return what runs where a link of a class is called, as far as a patch may replace it.

    Its ``__call__``, that of its base, which a layer for atoms calls, and its ``forward``.
    """
    return kind.__call__, kind.__base__.__call__, getattr(kind, 'forward', None)


# Class -> :func:`calls_of` it, as the sparse links know it: of layers, and of the classes that are
# swapped, which `remember` adds.
CALLS: dict[type, tuple] = {}


def remember(*kinds: type) -> None:
    """Know the code of classes as it is now."""
    for kind in kinds:
        CALLS[kind] = calls_of(kind)


remember(*LINEAR, *NORMS, *TABLES, *INSIDE, links.NStepLSTM, links.LayerNormalization)


def is_known(layer: object, kinds: tuple[type, ...]) -> bool:
    """Return whether a layer is exactly of one of these classes, whose code is what it was."""
    kind = type(layer)
    return kind in kinds and CALLS[kind] == calls_of(kind) and 'forward' not in vars(layer)


def are_patched(kinds: tuple[Any, ...]) -> bool:
    """Return whether the code of one of these classes is not what it was."""
    for kind in kinds:  # `calls_of` without a call, because models ask in every forward pass
        calls = kind.__call__, kind.__base__.__call__, getattr(kind, 'forward', None)
        if CALLS[kind] != calls:
            return True
    return False


def expect_known(layer: object, kinds: tuple[type, ...]) -> None:
    """Refuse a layer that is not known, under its own name: callers know the whole path."""
    if not is_known(layer, kinds):
        refuse(getattr(layer, 'name', None) or 'a layer', layer, kinds)


def expect_norm(layer: object) -> None:
    """Refuse a batch normalisation whose code is neither known nor that of several ranks."""
    if not _is_of_ranks(layer):
        expect_known(layer, NORMS)


def _is_of_ranks(layer):
    return hasattr(type(layer), 'bspmm_ranks')  # such as ChainerMN's: `ops.batch_norm` knows it


def refuse(path: str, layer: object, kinds: tuple[type, ...]) -> NoReturn:
    """Raise UnknownLayer for the layer at a path."""
    kind = type(layer)
    got = 'a %s.%s' % (kind.__module__, kind.__qualname__)
    if kind in kinds:
        got += ' whose forward pass was replaced'
    raise UnknownLayer(
        '%s: expected exactly a %s as Chainer or Chainer Chemistry defines it, because a sparse '
        'batch is computed with its parameters and its code does not run, got %s. %s'
        % (path, ' or '.join(known.__name__ for known in kinds), got, REMEDY)
    )


def check_layers(owner: object, layers: dict[str, tuple[type, ...]], prefix: str = '') -> None:
    """Refuse a layer that is not known, in one of these attributes or inside of one, with its path.

    An attribute holds a layer or a list of layers; some models lack it, or have None there.
    """
    for name, kinds in layers.items():
        held = getattr(owner, name, None)
        is_list = isinstance(held, (list, tuple, ChainList)) and not isinstance(held, kinds)
        for i, layer in enumerate(held if is_list else [held]):
            path = '%s%s.%d' % (prefix, name, i) if is_list else prefix + name
            if layer is None or (kinds is NORMS and _is_of_ranks(layer)):
                continue
            if not is_known(layer, kinds):
                refuse(path, layer, kinds)
            check_layers(layer, INSIDE.get(type(layer), {}), path + '.')


def expect_elementwise(activation: Any) -> None:
    """Refuse an activation of atoms that gives rows other numbers than upstream's arrays."""
    if activation in ALONG_AXIS_1:
        raise ValueError(
            'activation: expected a function of each element, got %s, which Chainer Chemistry '
            'applies along the atoms of a padded molecule. %s' % (activation.__name__, REMEDY)
        )


def refuse_patched(path: str, link: object, kind: type) -> None:
    """Raise UnknownLayer if the code of a link of upstream's class `kind` is not what it was.

    Or the code of the class, if the link is of the one that replaces it.
    """
    if CALLS[kind] != calls_of(kind) or (type(link) is kind and 'forward' in vars(link)):
        raise UnknownLayer(
            '%s: expected %s as Chainer Chemistry defines it, because a sparse batch is computed '
            'in its place, got one whose forward pass was replaced. %s'
            % (path, kind.__name__, REMEDY)
        )
