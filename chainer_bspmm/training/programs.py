"""The captured programs of an updater or a predictor, by the layout of their batches."""

import collections

from chainer_bspmm.training.step_program import CannotCapture

MAX_PROGRAMS = 16  # that are kept; the one unused for longest goes
MAX_NEW = 32  # layouts in a row that were never seen before: something changes every time


class Programs(collections.OrderedDict):
    """Layout -> program. A layout is a tuple that ends in a key of `Frozen`.

    Args:
        what (str): what a program does, for the message.
    """

    def __init__(self, what):
        super().__init__()
        self._what = what
        self._n_new = 0
        self._last_key = None

    def find(self, layout):
        """Return the program of a layout; None: it is new."""
        program = self.get(layout)
        if program is not None:
            self.move_to_end(layout)
            self._n_new = 0
            self._last_key = layout[-1]
        return program

    def expect(self, layout, frozen):
        """Count a new layout.

        Raises:
            CannotCapture: too many in a row, none of which came again.
        """
        self._n_new += 1
        if self._n_new > MAX_NEW:
            raise CannotCapture(
                'no %s can be replayed, for %s changes with every one'
                % (self._what, frozen.changed(self._last_key, layout[-1]))
            )

    def add(self, layout, program):
        """Keep a program."""
        self[layout] = program
        self._last_key = layout[-1]
        if len(self) > MAX_PROGRAMS:
            self.popitem(last=False)
