"""What all tests share: the two array modules, and poisoned GPU memory."""
import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
from chainer.backends import cuda

from tests.support import poisoned


@pytest.fixture(params=['numpy', pytest.param('cupy', marks=pytest.mark.gpu)])
def xp(request, monkeypatch):
    """numpy, and cupy with every new array full of NaN; the latter is skipped without a GPU."""
    if request.param == 'numpy':
        return numpy
    if not cuda.available:
        pytest.skip('no GPU: CuPy is not installed or finds no device')
    poisoned(monkeypatch, cuda.cupy)
    return cuda.cupy


def pytest_collection_modifyitems(items):
    """Skip tests that are marked gpu as a whole where there is none."""
    for item in items:
        if item.get_closest_marker('gpu') and not cuda.available:
            item.add_marker(pytest.mark.skip(
                reason='no GPU: CuPy is not installed or finds no device'))
