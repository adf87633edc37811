"""What bspmm has with a BatchedSELL only: sizes of slices, and what it refuses."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import BatchedCSR
from chainer_bspmm import BatchedSELL
from chainer_bspmm import functions
from chainer_bspmm import papers
from chainer_bspmm.papers import bspmm
from chainer_bspmm.papers.products import bspmm_forward
from tests.support import assert_close
from tests.support import batch_on
from tests.support import BATCHES
from tests.support import features
from tests.support import reference


# Sizes of slices, whether rows are sorted, dtypes: all pairs of the last two with most sizes.
FORMS = [
    (1, False, 'float16'),
    (1, True, 'float32'),
    (2, False, 'float64'),
    (7, True, 'float64'),
    (7, False, 'float32'),
    (32, True, 'float16'),
    (32, False, 'float32'),
    (64, True, 'float32'),
    (64, False, 'float16'),
    (1000, True, 'float64'),
]


@pytest.mark.parametrize('size, sort_rows, dtype', FORMS)
def test_product_of_every_slice_size(xp, size, sort_rows, dtype):
    for name in BATCHES:
        rng = numpy.random.RandomState(0)
        adj = batch_on(name, xp, dtype)
        sell = BatchedSELL(adj, size, sort_rows)
        for trans in (False, True):
            n_in, n_out = adj.shape if trans else adj.shape[::-1]
            x = features(rng, xp, n_in, 9, dtype)
            residual = features(rng, xp, n_out, 9, dtype)
            expected = reference.bspmm(adj, x, trans=trans)  # columns do not depend on each other
            for n in (1, 4, 9):
                first, added = x[:, :n].copy(), residual[:, :n].copy()
                assert_close(bspmm_forward(sell, first, trans=trans), expected[:, :n], dtype)
                assert_close(
                    bspmm_forward(sell, first, None, added, trans),
                    expected[:, :n] + cuda.to_cpu(added),
                    dtype,
                )


# --- what is refused ---


@pytest.mark.parametrize(
    'changes, error, message',
    [
        (
            {'x': numpy.ones((4, 2), 'f')},
            ValueError,
            r'x: expected shape \(3, n_B\) to go with <BatchedSELL.* got \(4, 2\)',
        ),
        (
            {'x': numpy.ones((3, 2))},
            TypeError,
            'x: expected float32 as the values of adj, got float64',
        ),
        (
            {'data': numpy.ones(2, 'f')},
            ValueError,
            'data: expected None, because a BatchedSELL .* got ndarray; '
            'edge values go with a BatchedCSR',
        ),
        ({'residual': numpy.ones((3, 1), 'f')}, ValueError, r'residual: expected shape \(3, 2\)'),
        (
            {'algorithm': 'vector'},
            ValueError,
            "algorithm on a CPU: expected one of 'auto', got 'vector'",
        ),
    ],
)
def test_bad_input(monkeypatch, changes, error, message):
    monkeypatch.setattr(papers.cpu, 'bspmm', lambda *_: pytest.fail('launched'))
    sell = BatchedSELL(BatchedCSR.from_matrices([numpy.full((2, 2), 3, 'f'), numpy.eye(1)])).astype(
        'float32'
    )
    with pytest.raises(error, match=message):
        bspmm(**dict({'adj': sell, 'x': numpy.ones((3, 2), 'f')}, **changes))


def test_other_functions_want_csr():
    sell, x = BatchedSELL(BATCHES['one graph']), numpy.ones((5, 2))
    for call in (lambda: functions.bsddmm(sell, x, x), lambda: functions.segment_sum(sell, x)):
        with pytest.raises(TypeError, match='adj: expected a BatchedCSR, got'):
            call()
