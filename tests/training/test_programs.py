"""Which programs are kept, and when something changes too often."""

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer

from chainer_bspmm.training.guards import Frozen
from chainer_bspmm.training.programs import MAX_NEW
from chainer_bspmm.training.programs import MAX_PROGRAMS
from chainer_bspmm.training.programs import Programs
from chainer_bspmm.training.step_program import CannotCapture


def test_the_one_unused_for_longest_goes():
    programs = Programs('step')
    for number in range(MAX_PROGRAMS):
        programs.add((number,), str(number))
    assert programs.find((0,)) == '0'
    programs.add((MAX_PROGRAMS,), 'new')
    assert programs.find((1,)) is None and programs.find((0,)) == '0'
    assert len(programs) == MAX_PROGRAMS


def test_something_that_changes_every_time():
    link = chainer.Link()
    link.number = 0
    frozen, programs = Frozen(link, link), Programs('step')

    def meet():
        layout = 'form', frozen.key()
        if programs.find(layout) is None:
            programs.expect(layout, frozen)
            programs.add(layout, 'program')

    for _ in range(3):  # each time one of them comes again
        for link.number in range(MAX_NEW):
            meet()
        meet()
    with pytest.raises(CannotCapture, match='no step can be replayed, for the attribute number'):
        for link.number in numpy.arange(1000.0):
            meet()
    assert link.number == MAX_NEW
