"""`set_up_predictor`: a swapped predictor by the name of its method."""

from typing import Any, Callable

import chainer
from chainer_chemistry.config import MAX_ATOMIC_NUM
from chainer_chemistry.models.cgcnn import CGCNN
from chainer_chemistry.models.cwle.cwle_graph_conv_model import MAX_WLE_NUM
from chainer_chemistry.models.megnet import MEGNet
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction.set_up_predictor import (
    set_up_predictor as set_up_dense_predictor,
)
from chainer_chemistry.models.schnet import SchNet
from chainer_chemistry.models.weavenet import WeaveNet

from chainer_bspmm.models.refusals import LISTED, REFUSALS, UNSWAPPED
from chainer_bspmm.models.sparsify import sparsify

LABELLED = ('', '_wle', '_cwle', '_gwle')  # with Weisfeiler-Lehman labels, as atoms or in addition
VARIANTS = {
    **dict.fromkeys(('nfp', 'ggnn', 'rsgcn', 'gin'), LABELLED + ('_gwm',)),
    **dict.fromkeys(('relgcn', 'relgat'), LABELLED),
    'gnnfilm': ('',),
}
METHODS = tuple(base + variant for base, variants in VARIANTS.items() for variant in variants)

# Methods whose batches are packed, because upstream's are lists of edges.
EDGE_LIST_METHODS = ('relgcn_sparse', 'gin_sparse')

# Methods of Chainer Chemistry that have no sparse form.
REFUSED = {'schnet': SchNet, 'weavenet': WeaveNet, 'megnet': MEGNet, 'cgcnn': CGCNN}


def set_up_predictor(
    method: str,
    n_unit: int,
    conv_layers: int,
    class_num: int,
    label_scaler: chainer.Link | None = None,
    postprocess_fn: Callable[[Any], Any] | None = None,
    n_atom_types: int = MAX_ATOMIC_NUM,
    conv_kwargs: dict[str, Any] | None = None,
    n_wle_types: int = MAX_WLE_NUM,
) -> GraphConvPredictor:
    """Set up a predictor on sparse batches: a graph convolution and a perceptron.

    It is ``sparsify`` of the predictor that
    ``chainer_chemistry.models.prediction.set_up_predictor`` returns for the same arguments; random
    numbers are drawn in the same order. Batches come from ``chainer_bspmm.concat_mols``.
    ``'gin_sparse'`` and ``'relgcn_sparse'`` need ``CSRConverter('packed')``. Packed batches for
    ``'*_wle'``, whose labels begin at 0, need ``CSRConverter('packed', strip_padding=False)``.

    Args:
        method (str): one of `METHODS`, ``'gin_sparse'``, ``'relgcn_sparse'``, or ``'mpnn'`` with
            ``conv_kwargs={'message_func': 'ggnn'}``.
        n_unit (int): width of the hidden layers. As upstream, ``'relgcn'`` has widths 16, 128 and
            64, and uses ``n_unit`` for its result only.
        conv_layers (int): number of updates; ignored by ``'relgcn'``.
        class_num (int): width of the prediction.
        label_scaler (chainer.Link or None): its inverse is applied to the prediction.
        postprocess_fn (callable or None): applied by ``predict``.
        n_atom_types (int): size of the embedding.
        conv_kwargs (dict or None): further arguments of the model's constructor.
        n_wle_types (int): number of labels of ``'*_cwle'`` and ``'*_gwle'``.

    Returns:
        chainer_chemistry.models.prediction.GraphConvPredictor: with a model of ``chainer_bspmm``.

    Raises:
        ValueError: ``method`` is unknown, or has no sparse form.

    Example:
        >>> from chainer_bspmm.models import set_up_predictor
        >>> predictor = set_up_predictor('rsgcn', n_unit=16, conv_layers=4, class_num=1)
        Set up RSGCN predictor...
        >>> type(predictor.graph_conv)
        <class 'chainer_bspmm.models.rsgcn.RSGCN'>
    """
    if method in REFUSED:
        text = 'method: %r %s.\n%s. %s'
        raise ValueError(text % (method, REFUSALS[REFUSED[method]], UNSWAPPED, LISTED))
    known = METHODS + EDGE_LIST_METHODS + ('mpnn',)
    if method not in known:
        methods = ', '.join(map(repr, known))
        raise ValueError('method: expected one of %s, got %r' % (methods, method))
    return sparsify(
        set_up_dense_predictor(
            method,
            n_unit=n_unit,
            conv_layers=conv_layers,
            class_num=class_num,
            label_scaler=label_scaler,
            postprocess_fn=postprocess_fn,
            n_atom_types=n_atom_types,
            conv_kwargs=conv_kwargs,
            n_wle_types=n_wle_types,
        )
    )
