"""`Programs`: those that are kept, by what determines them."""

import collections

from chainer_bspmm.training.batches import capacities
from chainer_bspmm.training.cuda_graphs import CannotCapture

MAX_PROGRAMS = 16  # that are kept; the least recently used is dropped
# New programs while none that is captured comes again. After more, the first of them would be gone
# if it came: something changes with every step.
MAX_NEW = MAX_PROGRAMS


class Programs(collections.OrderedDict):
    """Programs by their key.

    That is (`Form`, source of the batch, `Capacity`, what else they depend on, the guards' `Key`).
    `name` is what a program does, in messages.
    """

    def __init__(self, name):
        super().__init__()
        self._name = name
        self._capacities = {}  # (number of graphs, layout) -> Capacities
        self.clear()

    def clear(self):
        super().clear()
        self._n_new = 0
        self._last_key = None
        self._last = None, None  # key and program that were found last

    def capacity(self, form, need, dataset):
        """Return the `Capacity` for a batch of a data set (any object)."""
        key = form.n_graphs, form.layout
        if key not in self._capacities:
            self._capacities[key] = capacities(dataset, *key)
        return self._capacities[key].of(need)

    def find(self, key):
        """Return the program of a key; None: it is new. Too many in a row are CannotCapture."""
        last, program = self._last
        if key == last:  # mostly the same objects: no need to hash them
            return program
        program = self.get(key)
        if program is not None:
            self._last = key, program
            self.move_to_end(key)
            if program.is_captured:
                self._n_new = 0
            self._last_key = key[-1]
            return program
        self._last = None, None
        self._n_new += 1
        if self._n_new > MAX_NEW:
            text = 'no %s can be replayed, because %s changes with every one'
            raise CannotCapture(text % (self._name, key[-1].change(self._last_key)))
        return None

    def add(self, key, program):
        """Keep a program, unless there is one."""
        self._last = None, None
        self.setdefault(key, program)
        self._last_key = key[-1]
        if len(self) > MAX_PROGRAMS:
            self.popitem(last=False)

    def move(self, key, program):
        """Keep a program by this key alone."""
        for other in [other for other, kept in self.items() if kept is program or other == key]:
            del self[other]
        self.add(key, program)
