"""The papers' Sub-Warp-Assigned kernels at the limit of shared memory, and what they refuse."""

import numpy
import pytest

from chainer_bspmm.papers import bspmm
from chainer_bspmm.papers.products import bspmm_forward
from tests.support import assert_close
from tests.support import batch_on
from tests.support import DTYPES
from tests.support import features
from tests.support import reference


# The fixture `xp` without its NumPy half: these algorithms are kernels.
on_gpu = pytest.mark.parametrize('xp', [pytest.param('cupy', marks=pytest.mark.gpu)], indirect=True)


@on_gpu
@pytest.mark.parametrize('algorithm', ['swa', 'swa_blocked'])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('n_channels', [1025, 2048, 2049, 4097])
def test_product_about_the_budget_of_shared_memory(xp, n_channels, dtype, algorithm):
    rng = numpy.random.RandomState(0)
    adj = batch_on('empty graphs first, between, last', xp, dtype)
    x = features(rng, xp, adj.n_cols, n_channels, dtype)
    assert_close(bspmm_forward(adj, x, algorithm=algorithm), reference.bspmm(adj, x), dtype)


@on_gpu
def test_rows_that_do_not_fit(xp):
    adj = batch_on('one graph', xp, 'float32')
    x = xp.ones((adj.n_cols, 2049), 'f')
    with pytest.raises(ValueError, match='^algorithm: swa_rows .* 32768 .* n_B = 2049'):
        bspmm(adj, x, algorithm='swa_rows')
