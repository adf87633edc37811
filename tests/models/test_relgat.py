"""RelGAT: options that are refused."""

import pytest

from chainer_chemistry.models import RelGAT as DenseRelGAT

from chainer_bspmm import sparsify
from chainer_bspmm.models import RelGAT


def test_tied_update_that_cannot_take_its_own_result():
    options = {'weight_tying': True, 'concat_heads': True}
    with pytest.raises(ValueError, match='weight_tying: expected False .* takes 16 .* gives 48'):
        RelGAT(3, **options)
    with pytest.raises(ValueError, match=r'model\.weight_tying: expected False'):
        sparsify(DenseRelGAT(3, **options))
    RelGAT(3, n_update_layers=1, **options)
