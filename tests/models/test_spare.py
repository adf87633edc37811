"""The five models on a batch in buffers larger than it is: the same predictions and gradients."""

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda
from chainer_chemistry.models.prediction import set_up_predictor

from chainer_bspmm import sparsify
from chainer_bspmm.dataset import concat_mols
from tests.support.spare import with_spare
from tests.support import relative_error
from tests.support.molecules import molecules

SIZES = (5, 1, 9, 0, 7)
KINDS = {'rsgcn': 'normalised', 'gin': 'counted', 'nfp': 'counted bonds'}


@pytest.mark.parametrize('spare_rows, spare_nnz', [(0, 0), (11, 70)])
@pytest.mark.parametrize('method', ['rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp'])
def test_predictions_and_gradients(method, spare_rows, spare_nnz, device):
    numpy.random.seed(0)
    examples = molecules(SIZES, KINDS.get(method, 'relations'))
    with chainer.using_config('dtype', numpy.float32):
        predictor = sparsify(set_up_predictor(method, 8, 2, 3))
    atoms, adj, labels = concat_mols(examples)
    spare = with_spare(adj, spare_rows, spare_nnz).to_device(device)
    results = []
    for ids, matrix in ((atoms, adj), (numpy.pad(atoms, (0, spare_rows)), spare)):
        predictor.to_device(device)
        predictor.cleargrads()
        with chainer.using_config('train', False):
            y = predictor(device.send(ids), matrix.to_device(device))
        functions.sum(y * y).backward()
        results.append([y.array, *(param.grad for _, param in sorted(predictor.namedparams()))])
    for expected, actual in zip(*results):
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert not numpy.isnan(cuda.to_cpu(actual)).any()
            assert relative_error(actual, expected) <= 1e-5
