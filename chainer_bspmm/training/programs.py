"""`Programs`: the programs of a driver, kept by their keys."""

import collections

from chainer_bspmm.training.batches import capacities
from chainer_bspmm.training.cuda_graphs import CannotCapture

MAX_PROGRAMS = 16  # most programs that are kept; the least recently used is dropped
# Most new programs in a row without the use of a captured one. If there are more, something changes
# with every step: the first of them would be dropped before its key comes again.
MAX_NEW = MAX_PROGRAMS


class Programs(collections.OrderedDict):
    """Programs by their key.

    The key is (`Form`, source of the batch, `Capacity`, other items that the driver adds, the
    guards' `Key`). `name` is the word for a run of a program, in messages.
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
        self._last = None, None  # the key and program of the last `find`

    def capacity(self, form, need, dataset):
        """Return the `Capacity` for a batch of a data set (any object)."""
        key = form.n_graphs, form.layout
        if key not in self._capacities:
            self._capacities[key] = capacities(dataset, *key)
        return self._capacities[key].of(need)

    def find(self, key):
        """Return the program of a key, or None for a new key; CannotCapture if too many are new."""
        last, program = self._last
        if key == last:  # fast, because the items are usually the same objects; nothing is hashed
            return program
        program = self.get(key)
        if program is None:
            self._last = None, None
            self._n_new += 1
            if self._n_new > MAX_NEW:
                text = 'no %s can be replayed, because %s changes with every one'
                raise CannotCapture(text % (self._name, key[-1].change(self._last_key)))
        else:
            self._last = key, program
            self.move_to_end(key)
            if program.is_captured:
                self._n_new = 0
        self._last_key = key[-1]  # also of a program that will not be kept
        return program

    def add(self, key, program):
        """Keep a program by a key, unless there is one already."""
        self._last = None, None
        self.setdefault(key, program)
        self._last_key = key[-1]
        if len(self) > MAX_PROGRAMS:
            self.popitem(last=False)

    def move(self, key, program):
        """Keep a program by this key, and by no other."""
        for other in [other for other, kept in self.items() if kept is program or other == key]:
            del self[other]
        self.add(key, program)
