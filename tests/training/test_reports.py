"""Memory that replays write reported numbers to."""

import types
import typing

import numpy
import pytest

from chainer_bspmm.compat import late_sums
from chainer_bspmm.training import reports

ROW = 2 * reports.WIDTH  # bytes of a row of two numbers


class Pointer:
    """Stand-in for CuPy's pointer."""

    def __init__(self, address, memory):
        self.ptr = address
        self.mem = memory

    def __add__(self, n_bytes):
        return Pointer(self.ptr + n_bytes, self.mem)


class Table:
    """Stand-in for an array on a GPU."""

    def __init__(self, address):
        self.data = Pointer(address, object())


class Number(typing.NamedTuple):
    """Stand-in for CuPy's array, made from the same arguments."""

    shape: tuple
    dtype: str
    memory: Pointer


def test_which_values_are_numbers_on_the_host():
    values = {
        'beta': 0.5,
        'n': 3,
        'is_warm': True,
        'scale': numpy.float32(2),
        'large': 2**70,
        'word': 'one',
        'text': numpy.str_('one'),
        'nothing': None,
        'pair': (1, 2),
        'array': numpy.ones((), 'f'),
    }
    found = reports.host_numbers(values)
    assert {name: array.item() for name, array in found.items()} == {
        'beta': 0.5,
        'n': 3,
        'is_warm': True,
        'scale': 2,
    }
    assert all(array.shape == () for array in found.values())


@pytest.fixture
def given(monkeypatch):
    """`Reports` of a step that reports two numbers, the current stream, and all tables."""
    stream = types.SimpleNamespace(ptr=1)
    tables = []

    def empty(shape, dtype):
        assert shape == (reports.N_ROWS, 2)
        tables.append(Table((1 + len(tables)) << 30))
        return tables[-1]

    module = types.SimpleNamespace(get_current_stream=lambda: stream)
    cupy = types.SimpleNamespace(empty=empty, cuda=module, ndarray=Number)
    monkeypatch.setattr(reports, 'cuda', types.SimpleNamespace(cupy=cupy))
    monkeypatch.setattr(reports.Reports, '_load', lambda self: lambda *launch: None)
    found = reports.Reports(None)
    found._kinds = [('loss', 'f'), ('mae', 'f')]
    return found, stream, tables


def test_every_replay_has_a_row(given):
    found, _, tables = given
    rows = [found.next_row() for _ in range(reports.N_ROWS + 2)]
    first, second = (table.data.ptr for table in tables)
    assert rows[:-2] == [first + ROW * i for i in range(reports.N_ROWS)]
    assert rows[-2:] == [second, second + ROW]


def test_numbers_are_views_of_the_last_row(given):
    found, _, tables = given
    for _ in range(3):
        row = found.next_row()
    numbers = found.numbers()
    assert list(numbers) == ['loss', 'mae']
    for i, number in enumerate(numbers.values()):
        assert (number.shape, number.dtype) == ((), 'f')
        assert number.memory.ptr == row + reports.WIDTH * i
        assert number.memory.mem is tables[0].data.mem


def test_another_stream_has_other_memory(given):
    """Freed memory may be reused by later work on the stream on which it was allocated."""
    found, stream, tables = given
    found.next_row()
    stream.ptr = 2
    assert found.next_row() == tables[1].data.ptr


def test_values_need_no_copy_while_they_wait(given):
    found, _, tables = given
    found.next_row()
    assert late_sums._lasting[id(tables[0].data.mem)] is tables[0]
