"""RelGAT: training with dropout, options that are refused."""

import numpy
import pytest

import chainer
from chainer_chemistry.models import RelGAT as DenseRelGAT

from chainer_bspmm import concat_mols
from chainer_bspmm import sparsify
from chainer_bspmm.models import RelGAT
from tests.support.molecules import molecules


def test_training_with_dropout_learns(device):
    numpy.random.seed(0)
    model = RelGAT(3, dropout_ratio=0.1)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam(alpha=0.01).setup(model)
    *inputs, t = concat_mols(molecules(), device)
    losses = []
    for _ in range(40):
        optimizer.update(lambda: chainer.functions.mean_squared_error(model(*inputs), t))
        with chainer.using_config('train', False):
            losses.append(float(chainer.functions.mean_squared_error(model(*inputs), t).array))
    assert losses[-1] < losses[0] / 4


def test_tied_update_that_cannot_take_its_own_result():
    options = {'weight_tying': True, 'concat_heads': True}
    with pytest.raises(ValueError, match='weight_tying: expected False .* takes 16 .* gives 48'):
        RelGAT(3, **options)
    with pytest.raises(ValueError, match=r'model\.weight_tying: expected False'):
        sparsify(DenseRelGAT(3, **options))
    RelGAT(3, n_update_layers=1, **options)


def test_unknown_mode():
    with pytest.raises(ValueError, match="softmax_mode: expected .*'across', 'within'"):
        RelGAT(3, softmax_mode='beside')
