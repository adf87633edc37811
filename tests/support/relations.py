"""Batches with a column for every row and relation, and difficult entries."""

import numpy

from chainer_bspmm import BatchedCSR
from tests.support import batch_on, random_matrix

# Rows whose entries are not sorted by relation, with one entry twice.
UNSORTED = {
    'unsorted relations': BatchedCSR(
        indptr=numpy.array([0, 4, 5, 7, 8]),
        indices=numpy.array([5, 0, 3, 2, 1, 4, 1, 7]),
        row_offsets=numpy.array([0, 3, 4]),
        n_relations=2,
    ),
    'unsorted values': BatchedCSR(
        indptr=numpy.array([0, 4, 5, 7]),
        indices=numpy.array([4, 0, 5, 4, 2, 7, 6]),
        row_offsets=numpy.array([0, 2, 3]),
        data=numpy.linspace(-1, 2, 7),
        n_relations=3,
    ),
}
NAMES = [
    'four relations',
    'many',
    'symmetric ones',
    'no entries',
    'padded',
    'only empty graphs',
    'empty graphs first, between, last',
    'isolated nodes',
    'dense blocks',
    'duplicates, unsorted',
    *UNSORTED,
]
# There are four columns for one row and one relation.
TOO_WIDE = BatchedCSR(
    indptr=numpy.array([0, 1]),
    indices=numpy.array([0]),
    row_offsets=numpy.array([0, 1]),
    col_offsets=numpy.array([0, 4]),
)


def relation_batch_on(name, xp, dtype):
    """Return one of the batches in a dtype on a device."""
    if name not in UNSORTED:
        return batch_on(name, xp, dtype)
    adj = UNSORTED[name].astype(dtype)
    return adj if xp is numpy else adj.to_device('@cupy:%d' % xp.cuda.Device().id)


def small_relation_batch_on(name, xp):
    """Return one of the batches in float64, with few enough nodes for numerical gradients."""
    if name != 'four relations':
        return relation_batch_on(name, xp, 'float64')
    rng = numpy.random.RandomState(0)
    adj = BatchedCSR.from_matrices([random_matrix(rng, n, 4) for n in (4, 0, 1, 3)])
    return adj if xp is numpy else adj.to_device('@cupy:0')
