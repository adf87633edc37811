"""Which programs are kept, when something changes too often, and which replays are checked."""

import types

import numpy
import pytest

import chainer_bspmm  # noqa: F401  first: it repairs Chainer
import chainer

from chainer_bspmm.training.guards import Guards
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.program import Program
from chainer_bspmm.training.programs import MAX_NEW, MAX_PROGRAMS, Programs


def test_the_least_recently_used_is_dropped():
    programs = Programs('step')
    made = [types.SimpleNamespace() for _ in range(MAX_PROGRAMS + 1)]
    for number in range(MAX_PROGRAMS):
        programs.add((number,), made[number])
    for number in (1, 0, 0):
        assert programs.find((number,)) is made[number]
    programs.add((MAX_PROGRAMS,), made[-1])
    assert programs.find((2,)) is None and programs.find((0,)) is made[0]
    assert programs.find((MAX_PROGRAMS,)) is made[-1] and len(programs) == MAX_PROGRAMS
    programs = Programs('step')
    programs.add((1, 2), types.SimpleNamespace())
    assert programs.find((1, 2)) is not None
    programs.clear()
    assert programs.find((1, 2)) is None


def test_something_that_changes_every_time():
    link = chainer.Link()
    link.number = 0
    guards = Guards(link, link)
    programs = Programs('step')

    def meet():
        layout = 'form', guards.key()
        if programs.find(layout) is None:
            programs.add(layout, types.SimpleNamespace())

    for _ in range(3):  # each time one of them comes again
        for link.number in range(MAX_NEW):
            meet()
        meet()
    message = (
        '^no step can be replayed, because the attribute number of Link changes with every one$'
    )
    with pytest.raises(CannotCapture, match=message):
        for link.number in numpy.arange(1000.0):
            meet()
    assert link.number == MAX_NEW


POWERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


@pytest.mark.parametrize(
    'every, expected',
    [(2000, [*POWERS, 2000, 4000]), (1500, [*POWERS, 1500, 3000, 4500]), (1, list(range(1, 5001)))],
)
def test_which_replays_are_checked(every, expected):
    program = object.__new__(Program)
    program._session = types.SimpleNamespace(check_every=every)
    checked = []
    for number in range(1, 5001):
        program._n_replays = number - 1
        if program.is_check_due():
            checked.append(number)
    assert checked == expected
