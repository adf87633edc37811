"""Chainer Chemistry's saliency calculators and `retain_inputs` on sparse batches.

Upstream's code takes arrays that are padded to one number of atoms. So a calculator gets sparse
batches in that form, and while it runs, a swapped model is upstream's again.
"""

import contextlib
import functools
import sys

import numpy

import chainer
from chainer.backends import cuda
from chainer.dataset.convert import concat_examples
from chainer_chemistry.models.prediction import base

from chainer_bspmm.compat import import_hooks
from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.models.sparse_model import EdgeListModel, remember_dense_training, SparseModel
from chainer_bspmm.models.sparsify import densify
from chainer_bspmm.sparse.batch import Batch

CALCULATOR = 'chainer_chemistry.saliency.calculator.base_calculator'


def take_sparse_batches():
    """Patch upstream's calculators and ``predict(retain_inputs=True)`` to take sparse batches."""
    kind = base.BaseForwardModel
    kind._forward = _keeping_inputs(kind._forward)
    import_hooks.repairs(CALCULATOR)(_repair_calculators)
    if CALCULATOR in sys.modules:
        _repair_calculators(sys.modules[CALCULATOR])


def _repair_calculators(module):
    kind = module.BaseCalculator
    kind._forward = _keeping_inputs(_in_dense_form(kind._forward))


def _tuple(values):
    return values if isinstance(values, tuple) else (values,)


def _batch_in(inputs):
    return next((value for value in inputs if isinstance(value, Batch)), None)


def _dense(inputs):
    """Return inputs in upstream's form: arrays (n_graphs, N, ...), with 0 for phantom atoms.

    In a sparse batch, the inputs up to and including the node columns are rows, (n_rows, ...).
    """
    adj = _batch_in(inputs)
    if adj is None:
        return inputs
    dense = adj.to_dense()
    if adj.layout not in ('packed', 'folded'):
        return tuple(dense if value is adj else value for value in inputs)

    offsets = cuda.to_cpu(adj.row_offsets)
    n_atoms = totals = numpy.diff(offsets)
    if adj.layout == 'folded':  # the last row of a molecule stands for its phantom atoms
        n_atoms = n_atoms - 1
        totals = n_atoms + cuda.to_cpu(adj.row_weights)[offsets[1:] - 1]
    n = int(totals.max(initial=0))
    graph, atom = numpy.nonzero(numpy.arange(n) < n_atoms[:, None])
    xp = adj.xp
    graph, atom, rows = map(xp.asarray, (graph, atom, offsets[graph] + atom))

    def spread(array):
        padded = xp.zeros((adj.n_graphs, n, *array.shape[1:]), array.dtype)
        padded[graph, atom] = array[rows]
        return padded

    matrices = xp.zeros((*dense.shape[:-2], n, n), dense.dtype)
    stored = min(n, dense.shape[-1])  # a folded matrix may also have the row of phantom atoms
    matrices[..., :stored, :stored] = dense[..., :stored, :stored]
    n_of_rows = 2 + adj.n_node_columns
    return tuple(
        matrices if value is adj else spread(value) if i < n_of_rows else value
        for i, value in enumerate(map(chainer.as_array, inputs))
    )


def _keeping_inputs(forward):
    """Wrap upstream's `_forward`, whose `retain_inputs` can only stack arrays of one size."""

    @functools.wraps(forward)
    def _forward(self, data, *args, retain_inputs=False, preprocess_fn=None, **kwargs):
        if not retain_inputs:
            return forward(self, data, *args, preprocess_fn=preprocess_fn, **kwargs)
        kept = []

        def keep(*inputs):
            if preprocess_fn is not None:
                inputs = _tuple(preprocess_fn(*inputs))
            kept.append([cuda.to_cpu(chainer.as_array(value)) for value in _dense(inputs)])
            return inputs

        result = forward(self, data, *args, preprocess_fn=keep, **kwargs)
        self.inputs = [_stacked(arrays) for arrays in zip(*kept)]
        return result

    return _forward


def _stacked(arrays):
    """Concatenate arrays of several batches, padded to the largest."""
    shape = numpy.max([array.shape[1:] for array in arrays], axis=0).astype(int)
    return numpy.concatenate(
        [
            numpy.pad(array, [(0, 0), *((0, more) for more in shape - array.shape[1:])])
            for array in arrays
        ]
    )


def _in_dense_form(forward):
    """Wrap `BaseCalculator._forward` so that its model and batches are dense, not sparse."""

    @functools.wraps(forward)
    def _forward(self, data, batchsize=16, converter=concat_examples, **kwargs):
        def convert(batch, device):
            return _dense(_tuple(converter(batch, device)))

        adj = _batch_in(_tuple(converter([data[0]], self._device)))
        if adj is None:
            return forward(self, data, batchsize, converter, **kwargs)
        if adj.layout == 'packed' or adj.padded_to is not None:
            batchsize = 1  # in a larger batch molecules would be padded to the largest one
        active = chainer._get_link_hooks()
        before = dict(active)
        try:
            with _densified(self.model):
                return forward(self, data, batchsize, convert, **kwargs)
        finally:
            active.clear()  # after an error upstream leaves its own hooks active
            active.update(before)

    return _forward


@functools.cache
def _hooked(kind):
    """Return a subclass whose `__call__` is Chainer's, which runs hooks, unlike upstream's."""
    return type(
        kind.__name__, (kind,), {'__call__': chainer.Link.__call__, 'forward': kind.__call__}
    )


@contextlib.contextmanager
def _densified(model):
    """Context in which a swapped model is dense; afterwards its sparse classes are put back."""
    swapped = [(link, type(link)) for link in model.links() if isinstance(link, Sparse)]
    for link, kind in swapped:
        if isinstance(link, EdgeListModel):
            raise ValueError(
                'model: got a %s, whose dense form takes lists of edges, which saliency '
                'calculators cannot pass' % kind.__name__
            )
    densify(model)
    try:
        for link, kind in swapped:
            if kind.upstream.__call__ is not chainer.Link.__call__:
                link.__class__ = _hooked(kind.upstream)
        yield
    finally:
        for link, kind in swapped:
            link.__class__ = kind
            if isinstance(link, SparseModel):
                remember_dense_training(link)
