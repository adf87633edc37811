"""Inner layers of a swapped link, which are not called: known classes, and the check for them.

A sparse link computes with the parameters of its linear layers, GRUs and norms, as part of larger
nodes. The code of such a layer does not run. So the layer must be of a known class, whose code has
not changed since this package was imported. `sparsify` refuses any other layer, and names its path.
If another one is put into a link later, or a class is patched, the next call refuses it.
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

# Class of a layer -> the layers in it that are not called either, in the form of
# `Sparse.inner_layers`.
INSIDE: dict[type, dict[str, tuple[type, ...]]] = {
    links.GRU: dict.fromkeys(('W', 'W_r', 'W_z', 'U', 'U_r', 'U_z'), LINEAR),
    GraphMLP: {'layers': LINEAR},
    mlp.MLP: {'layers': LINEAR, 'l_out': LINEAR},
    Set2Set: {'lstm_layer': (links.NStepLSTM,)},
    gwm.SuperNodeTransmitterUnit: {},
    gwm.GraphTransmitterUnit: {'V_super': LINEAR, 'B': LINEAR},
    gwm.WarpGateUnit: {'H': LINEAR, 'G': LINEAR},
}

# Functions that work along axis 1, which is the channels of our rows, but the atoms of upstream's
# arrays.
ALONG_AXIS_1 = (functions.softmax, functions.log_softmax, functions.normalize, functions.crelu)

REMEDY = (
    "Unswapped, with upstream's converter, the model runs as it is: "
    'python -m chainer_bspmm run SCRIPT.py'
)


class UnknownLayer(ValueError):
    """Error for a layer whose code would not run, because its class is unknown or was patched."""


def calls_of(kind: Any) -> tuple:
    """Return the methods of a class that a call of its links runs, and that a patch may replace.

    They are its ``__call__`` and ``forward``, and those of its base, because GraphLinear,
    GraphBatchNormalization and GRU call them.
    """
    base = kind.__base__
    forward, base_forward = getattr(kind, 'forward', None), getattr(base, 'forward', None)
    return kind.__call__, base.__call__, forward, base_forward


# Class -> its :func:`calls_of`, as the sparse links know it. `remember` adds layers here, and the
# classes that are swapped.
CALLS: dict[type, tuple] = {}


def remember(*kinds: type) -> None:
    """Record the present code of classes as the known one."""
    for kind in kinds:
        CALLS[kind] = calls_of(kind)


remember(*LINEAR, *NORMS, *TABLES, *INSIDE, links.NStepLSTM, links.LayerNormalization)


def is_known(layer: object, kinds: tuple[type, ...]) -> bool:
    """Return whether a layer is exactly of one of these classes, and its code unchanged."""
    kind = type(layer)
    return kind in kinds and CALLS[kind] == calls_of(kind) and 'forward' not in vars(layer)


def are_patched(kinds: tuple[Any, ...]) -> bool:
    """Return whether the code of one of these classes has been changed."""
    for kind in kinds:
        if CALLS[kind] != calls_of(kind):
            return True
    return False


def expect_known(layer: object, kinds: tuple[type, ...]) -> None:
    """Refuse a layer that is not known; the error has only its name, and callers add the path."""
    if not is_known(layer, kinds):
        refuse(getattr(layer, 'name', None) or 'a layer', layer, kinds)


def expect_norm(layer: object) -> None:
    """Refuse a batch normalisation that is neither known nor one over several ranks."""
    if not _is_of_ranks(layer):
        expect_known(layer, NORMS)


def _is_of_ranks(layer):
    return hasattr(type(layer), 'bspmm_ranks')  # ChainerMN's has it, and `ops.batch_norm` reads it


def refuse(path: str, layer: object, kinds: tuple[type, ...]) -> NoReturn:
    """Raise UnknownLayer for the layer at a path."""
    kind = type(layer)
    got = 'a %s.%s' % (kind.__module__, kind.__qualname__)
    if kind in kinds:
        got += ' whose forward pass was replaced'
    raise UnknownLayer(
        '%s: expected exactly a %s as Chainer or Chainer Chemistry defines it, got %s. A sparse '
        'batch is computed with the parameters of this layer, but its code does not run. %s'
        % (path, ' or '.join(known.__name__ for known in kinds), got, REMEDY)
    )


def check_layers(owner: object, layers: dict[str, tuple[type, ...]], prefix: str = '') -> None:
    """Refuse unknown layers in attributes of an owner, and inside these; the error has the path.

    `layers`: attribute -> known classes. An attribute holds a layer or a list of layers. Some
    models lack it, or have None there.
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
    """Refuse an activation that gives other results for rows than for upstream's arrays."""
    if activation in ALONG_AXIS_1:
        raise ValueError(
            'activation: expected a function of each element, got %s, which Chainer Chemistry '
            'applies along the atoms of a padded molecule. %s' % (activation.__name__, REMEDY)
        )


def refuse_patched(path: str, link: object, kind: type) -> None:
    """Raise UnknownLayer if the code of upstream's class `kind` has been changed.

    It is also raised if the link is of that class and has a `forward` among its attributes.
    """
    if CALLS[kind] != calls_of(kind) or (type(link) is kind and 'forward' in vars(link)):
        raise UnknownLayer(
            '%s: expected %s as Chainer Chemistry defines it, got a class whose forward pass was '
            'replaced. On a sparse batch the code of this class does not run. %s'
            % (path, kind.__name__, REMEDY)
        )
