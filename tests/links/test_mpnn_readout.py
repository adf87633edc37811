"""The readout of MPNN alone; tests/models/test_parity.py compares its numbers with upstream's."""

import numpy

from chainer_bspmm.links import MPNNReadout
from chainer_bspmm.sparse import BatchedCSR


def test_graph_without_nodes():
    readout = MPNNReadout(3, 4)
    adj = BatchedCSR.from_matrices([numpy.ones((n, n), 'f') for n in (2, 0, 3)])
    y = readout(numpy.ones((5, 4), 'f'), adj)
    assert y.shape == (3, 3) and numpy.isfinite(y.array).all()
