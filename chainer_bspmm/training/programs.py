"""Programs of captured training and prediction, and which of them are kept."""

from __future__ import annotations

import collections
import traceback
from typing import TYPE_CHECKING
import weakref

import chainer

from chainer_bspmm.compat.user_code import is_user_code
from chainer_bspmm.training import state
from chainer_bspmm.training.batches import capacities
from chainer_bspmm.training.buffers import Inputs

if TYPE_CHECKING:
    from chainer_bspmm.training.driver import Driver

CHECK_EVERY = 2000  # replays
MAX_PROGRAMS = 16  # that are kept; the least recently used is dropped
# Between a batch and the same batch with spare rows: products of other shapes round differently.
SPARE_TOLERANCE = {'float16': 3e-2, 'float32': 1e-3, 'float64': 1e-6}
MAX_NEW = 32  # new layouts in a row; more mean that something changes with every step


class CannotCapture(Exception):
    """The step cannot be replayed; the message says why, and where the cause is."""


class StepDiffers(RuntimeError):
    """A replayed step and the same step run eagerly gave different results.

    Attributes:
        reported (dict): what the eager step reported.
    """

    def __init__(self, message: str, reported: dict | None = None):
        super().__init__(message)
        self.reported = reported or {}


def spare_tolerance(dtype, model):
    """Return the largest relative change (float) of results of a dtype by spare rows."""
    dtypes = dtype, *(param.dtype for param in model.params(include_uninit=False))
    return max(SPARE_TOLERANCE[each.name] for each in dtypes)


class Program:
    """Computation for the batches of one layout: captured once, then replayed and checked."""

    # The first layout is checked at its first n replays, every layout at powers of two.
    n_first_checks = 0

    def __init__(self, driver: Driver, batch, capacity, n_numbers=None):
        # A driver has its programs: no garbage collection is needed to free the memory of both.
        self._driver = weakref.proxy(driver)
        self._check_every = driver.check_every
        self._inputs = Inputs(driver, batch, capacity, n_numbers)
        self._graph = None  # launches it, once captured
        self._reports = None  # made where numbers are reported by name
        self._n_replays = 0
        # False where the same was captured for batches of another size, and checked more often.
        self.is_first = True  # set by Programs.add
        self.is_done = False  # whether an update was run since the caller has set this to False

    @property
    def is_captured(self):
        return self._graph is not None

    def stage(self, batch, counter=0, numbers=None):
        """Send a batch, the number of the step and the optimizer's numbers, for one launch."""
        row_address = 0 if self._reports is None else self._reports.next_row()
        self._inputs.send(batch, counter, numbers, row_address, by_graph=self.is_captured)

    def compile_kernels(self, function):
        """Compile the kernels that a function launches, several at a time; change nothing."""
        # Ends at the first parameter that is still to be made. Not where a user's code would run:
        # it may keep arrays, such as constants, that nothing has written to.
        guards = self._driver.guards
        if guards.has_user_code:
            return
        with state.untouched(guards.owners, guards.params):
            self._driver.capturer.compile_kernels(function)

    def _capture(self, function, model):
        """Capture a function of the batch; return what launches it, and what it returned."""

        def whole():
            self._inputs.fetch()
            return function()

        try:
            return self._driver.capturer.capture(whole)
        except Exception as error:
            raise CannotCapture(blame(error, model)) from error

    def launch(self):
        """Launch the graph, with the batch that was staged."""
        self._inputs.fetched(self._graph())
        self.is_done = True

    def is_check_due(self):
        """Return whether the next replay is compared with the eager step."""
        number = self._n_replays + 1
        is_power = number & (number - 1) == 0
        is_early = (number <= 1024 and is_power) or (
            number <= self.n_first_checks and self.is_first
        )
        return is_early or not number % self._check_every


class Programs(collections.OrderedDict):
    """Programs by form, source, capacity, update variants, reporter's name and guards' key.

    A prediction has no variants and no reporter. The least recently used one is dropped.
    """

    def __init__(self, what):
        super().__init__()
        self._what = what  # a program does, for the message
        self.capacities = {}  # (number of graphs, layout) -> Capacities
        self.clear()

    def clear(self):
        super().clear()
        self._n_new = 0
        self._last_key = None
        self._last = None, None  # layout and program that were found last

    def capacity(self, form, need, dataset):
        """Return the `Capacity` for a batch of a data set (any object)."""
        key = form.n_graphs, form.layout
        if key not in self.capacities:
            self.capacities[key] = capacities(dataset, *key)
        return self.capacities[key].of(need)

    def find(self, layout):
        """Return the program of a layout; None: it is new. Too many in a row are CannotCapture."""
        last, program = self._last
        if layout == last:  # mostly the same objects: no need to hash them
            return program
        program = self.get(layout)
        if program is not None:
            self._last = layout, program
            self.move_to_end(layout)
            self._n_new = 0
            self._last_key = layout[-1]
            return program
        self._last = None, None
        self._n_new += 1
        if self._n_new > MAX_NEW:
            text = 'no %s can be replayed, because %s changes with every one'
            raise CannotCapture(text % (self._what, layout[-1].change(self._last_key)))
        return None

    def add(self, layout, program):
        """Keep a program."""
        self._last = None, None
        program.is_first = all(layout[3:] != other[3:] for other in self)
        self[layout] = program
        self._last_key = layout[-1]
        if len(self) > MAX_PROGRAMS:
            self.popitem(last=False)


def blame(error, model):
    """Return a sentence that says where an exception came from: place, link, message."""
    place = None
    link = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get('self')
        if isinstance(owner, chainer.Link):
            link = owner
        if place is None or is_user_code(frame.f_globals.get('__name__')):
            place = '%s, line %d, in %s' % (frame.f_code.co_filename, line, frame.f_code.co_name)
    where = 'the step'
    if link is not None:
        links = model.namedlinks() if isinstance(model, chainer.Link) else ()
        path = next((path for path, other in links if other is link), '')
        where = ('%s (%s)' % (path, type(link).__name__)).lstrip()
    return '%s cannot be captured: %s: %s (%s)' % (where, type(error).__name__, error, place)
