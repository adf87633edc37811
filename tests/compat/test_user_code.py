"""`is_user_code`: a user's modules, told from those of libraries by their names."""

import sys
import types

import pytest

from chainer_bspmm.compat.user_code import is_user_code


@pytest.mark.parametrize(
    'name', ['__main__', None, 'cuda', 'cuda.mine', 'cuda.core_losses', 'mine.chainer', 'chain']
)
def test_modules_of_a_user(name):
    assert is_user_code(name)


@pytest.mark.parametrize(
    'name',
    [
        'chainer',
        'cupyx.scipy.sparse',
        'cuda.pathfinder._utils',
        'os.path',
        'six',
        'namedtuple_Batch',
    ],
)
def test_modules_of_libraries(name):
    assert not is_user_code(name)


def test_an_imported_module_is_none_of_a_named_tuple(monkeypatch):
    monkeypatch.setitem(sys.modules, 'namedtuple_tools', types.ModuleType('namedtuple_tools'))
    assert is_user_code('namedtuple_tools')
