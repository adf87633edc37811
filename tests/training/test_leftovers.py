"""Values that one run of a batch leaves and the next one reads."""

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer

from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.leftovers import read_by_the_next_run
from chainer_bspmm.training.reach import Reach
from chainer_bspmm.training.snapshot import Snapshot


class Sums(chainer.Link):
    """A link that assigns two attributes and an entry of a dict, and reads one of them."""

    first = None
    last = None
    settings: dict

    def __init__(self):
        super().__init__()
        self.settings = {'last': None}
        self.n_runs = 0

    def forward(self, by_key=False):
        last = self.settings['last'] if by_key else self.last
        self.first = self.first or 3
        self.settings['last'] = self.last = 1 + (last or 0)
        return self.last


def found(function, link, run):
    def is_like_the_first(before):
        return run() == 1

    return read_by_the_next_run(lambda: Snapshot(link, Reach(link, function)), is_like_the_first)


def test_an_attribute_that_is_read():
    link = Sums()
    assert found(Sums.forward, link, link.forward) == 'the attribute last of Sums'
    assert link.last is None and link.first is None and link.settings == {'last': None}


def test_an_entry_of_a_dict_that_is_read():
    link = Sums()
    text = found(Sums.forward, link, lambda: link.forward(by_key=True))
    assert text == "'last' in the attribute settings of Sums"


def test_nothing_is_named_if_runs_from_one_state_differ():
    link = Sums()
    results = iter([2, 1, 1, 1])
    assert found(Sums.forward, link, lambda: next(results)) is None


def test_nothing_is_named_if_no_value_alone_makes_a_difference():
    link = Sums()

    def run():
        is_left = link.first is not None and link.last is not None
        link.forward()
        return 2 if is_left else 1

    assert found(Sums.forward, link, run) is None


def test_a_run_that_fails_with_one_of_several_values():
    link = Sums()

    def run():
        if link.first is not None:
            raise CannotCapture('the other value is missing')
        return link.forward()

    assert found(Sums.forward, link, run) == 'the attribute last of Sums'
