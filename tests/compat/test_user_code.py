"""`is_user_code`: a user's modules, told from those of libraries by their names."""

import sys
import types

import pytest

from chainer_bspmm.compat import user_code
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
        *('os.path', 'sys', 'statistics', '_socket'),
        'six',
        'namedtuple_Batch',
    ],
)
def test_modules_of_libraries(name):
    assert not is_user_code(name)


def test_an_imported_module_is_none_of_a_named_tuple(monkeypatch):
    monkeypatch.setitem(sys.modules, 'namedtuple_tools', types.ModuleType('namedtuple_tools'))
    assert is_user_code('namedtuple_tools')


@pytest.fixture
def statistics(monkeypatch):
    user_code._is_of_python.cache_clear()
    module = types.ModuleType('statistics')
    monkeypatch.setitem(sys.modules, 'statistics', module)
    yield module
    user_code._is_of_python.cache_clear()


def test_a_user_s_file_may_have_the_name_of_one_of_python_s(statistics, tmp_path):
    statistics.__file__ = str(tmp_path / 'statistics.py')
    assert is_user_code('statistics')
