"""Programs that are kept, the sizes of their buffers, and values that change too often."""

import types

import numpy
import pytest

import chainer_bspmm  # noqa: F401  first: it repairs Chainer
import chainer

from chainer_bspmm import CSRConverter
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.training import batches
from chainer_bspmm.training.guards import Guards
from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.programs import MAX_NEW, MAX_PROGRAMS, Programs
from tests.support.training import HOST, molecules


def program(is_captured=True):
    return types.SimpleNamespace(is_captured=is_captured)


def test_the_least_recently_used_is_dropped():
    programs = Programs('step')
    made = [program() for _ in range(MAX_PROGRAMS + 1)]
    for number in range(MAX_PROGRAMS):
        programs.add((number,), made[number])
    for number in (1, 0, 0):
        assert programs.find((number,)) is made[number]
    programs.add((MAX_PROGRAMS,), made[-1])
    assert programs.find((2,)) is None and programs.find((0,)) is made[0]
    assert programs.find((MAX_PROGRAMS,)) is made[-1] and len(programs) == MAX_PROGRAMS
    programs = Programs('step')
    programs.add((1, 2), program())
    assert programs.find((1, 2)) is not None
    programs.clear()
    assert programs.find((1, 2)) is None


def test_a_program_is_not_replaced_but_moved():
    """An eager program does not replace a captured one, and a captured program has one key."""
    programs = Programs('step')
    captured, other = program(), program()
    programs.add(('here',), captured)
    for key in (('here',), ('there',), ('elsewhere',)):
        programs.add(key, other)
    assert programs.find(('here',)) is captured and programs.find(('there',)) is other
    programs.move(('here',), other)
    assert [*programs] == [('here',)] and programs.find(('here',)) is other


def test_something_that_changes_every_time():
    link = chainer.Link()
    link.number = 0
    guards = Guards(link, link)
    programs = Programs('step')

    def meet():
        layout = 'form', guards.key()
        if programs.find(layout) is None:
            programs.add(layout, program())

    for _ in range(3):  # one of the keys comes again every time
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


@pytest.mark.parametrize('is_kept', [True, False])
def test_programs_that_are_never_replayed(is_kept):
    """Each key comes twice, as if a step changed a value that the next one reads.

    Or no program is kept, as if each step made a parameter that the one before it lacked.
    """
    programs = Programs('step')
    link = chainer.Link()
    guards = Guards(link, link)
    message = (
        '^no step can be replayed, because the attribute number of Link changes with every one$'
    )
    with pytest.raises(CannotCapture, match=message):
        for link.number in range(1000):
            key = 'form', guards.key()
            assert programs.find(key) is None
            if is_kept:
                programs.add(key, program(is_captured=False))
                assert programs.find(key) is not None
    assert link.number == MAX_NEW


def test_layouts_have_sizes_of_their_own():
    """Packed batches that come after a padded one do not get as many rows."""
    data_set = to_sparse(molecules(400))
    programs = Programs('step')
    rows = {}
    for layout in ('padded', 'folded', 'packed'):
        batch = batches.batch_of(batches.Conversion(data_set[:100], CSRConverter(layout), HOST))
        rows[layout] = programs.capacity(batch.form, batch.need, data_set).rows
        assert rows[layout] == batches.capacities(data_set, 100, layout).of(batch.need).rows
    assert rows['padded'] > rows['folded'] > rows['packed']
