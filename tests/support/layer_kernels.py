"""Layers of graph convolutions in float64, with which kernels are compared, and matrices."""

import types

import numpy

from chainer_bspmm.ops.graph_linear.launches import Layer
from tests.support import reference

# Roundings of results to their dtype, and of sums to the dtype of the calculation.
BOUND = {'e': 2**-9, 'f': 2**-19, 'd': 2**-47}
ACTIVATIONS = {
    'identity': (lambda v: v, lambda y: numpy.ones_like(y)),
    'relu': (lambda v: numpy.maximum(v, 0), lambda y: (y > 0).astype(y.dtype)),
    'tanh': (numpy.tanh, lambda y: 1 - y * y),
    'sigmoid': (lambda v: 1 / (1 + numpy.exp(-v)), lambda y: y * (1 - y)),
}


def layer(width_in, width_out, n_relations=0, activation='identity', **options):
    fields = dict(
        has_self=not n_relations, loop=False, has_relation_bias=False, n_biases=0, by_relation=False
    )
    return Layer(width_in, width_out, n_relations, activation=activation, **{**fields, **options})


def matrices(n_rows, n_relations, dtype, is_weighted=True, seed=0):
    """Return matrices (R, n_rows, n_rows) whose rows have no, few or many entries."""
    rng = numpy.random.RandomState(seed)
    shape = n_relations, n_rows, n_rows
    found = rng.uniform(0.5, 2, shape) * (rng.uniform(size=shape) < 0.1)
    if n_rows > 3:
        found[0, 2] = rng.uniform(0.5, 2, n_rows)
        found[:, 3] = 0
    return (found if is_weighted else found != 0).astype(dtype)


def side(gpu, stacked, is_weighted):
    """Return matrices (R, n, n) as the arrays of one CSR matrix with rows i * R + r."""
    flat = stacked.transpose(1, 0, 2).reshape(-1, stacked.shape[2])
    rows, columns = numpy.nonzero(flat)
    counts = numpy.bincount(rows, minlength=len(flat))
    return types.SimpleNamespace(
        indptr=gpu.put(numpy.concatenate([[0], counts.cumsum()]).astype('i4')),
        indices=gpu.put(columns.astype('i4')),
        data=gpu.put(flat[rows, columns]) if is_weighted else None,
    )


def by_relation(spec, W):
    """Return the matrices or biases of each relation, (R, n_out, ...)."""
    shape = (spec.n_relations, spec.width_out) if spec.by_relation else (-1, spec.n_relations)
    blocks = W.reshape(shape + W.shape[1:])
    return blocks if spec.by_relation else blocks.swapaxes(0, 1)


def flat(spec, blocks):
    blocks = blocks if spec.by_relation else blocks.swapaxes(0, 1)
    return blocks.reshape((-1,) + blocks.shape[2:])


def expected(spec, A, x, parameters, gy, kept=1.0):
    """Compute y and all gradients in float64, and the largest value before the activation.

    kept: factors of dropout.
    """
    W, W_self, b, b_self = parameters
    A = A.copy()
    if spec.loop:
        A[0] += numpy.eye(len(x))
    if spec.by_relation:
        rows = by_relation(spec, W).swapaxes(0, 1).reshape(W.shape)
    else:
        rows = W
    total = b_self.reshape(spec.n_biases, -1).sum(axis=0) if spec.n_biases else None
    value = reference.graph_linear(A[: spec.n_relations], x, rows, b, W_self, total)
    function, derivative = ACTIVATIONS[spec.activation]
    y = function(value) * kept
    z = gy * kept * derivative(function(value))
    gx = 0
    gradients = {}
    if spec.n_relations:
        S = numpy.einsum('rij,ic->rjc', A, z)
        gx = gx + numpy.einsum('rjc,rck->jk', S, by_relation(spec, W))
        gradients['W'] = flat(spec, numpy.einsum('rjc,jk->rck', S, x))
        if spec.has_relation_bias:
            gradients['b'] = flat(spec, S.sum(axis=1))
    if spec.has_self:
        gx = gx + z @ W_self
        gradients['W_self'] = z.T @ x
    if spec.n_biases:
        gradients['b_self'] = z.sum(axis=0)
    return dict(gradients, y=y, x=gx), abs(value).max()
