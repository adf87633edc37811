"""`read_by_the_next_run`: the value that one run of a batch leaves and the next one reads."""

import contextlib
from collections.abc import Callable

from chainer_bspmm.training.cuda_graphs import CannotCapture
from chainer_bspmm.training.places import Place
from chainer_bspmm.training.snapshot import Snapshot

MOST = 64  # most values that are tried, each in a run


def read_by_the_next_run(
    take_snapshot: Callable[[], Snapshot], is_like_the_first: Callable[[Snapshot], bool]
) -> str | None:
    """Return words for a value that makes the next run differ from the first; None if unknown.

    Each value that the first run assigns is assigned alone, to the state before that run, and the
    batch is run again. All runs are undone.

    Args:
        take_snapshot: returns a snapshot of the present state, the one before the first run.
        is_like_the_first: runs the batch, given a snapshot of the state before the run, and returns
            whether its results are those of the first run.
    """
    before = take_snapshot()
    with before.undone():
        if not is_like_the_first(before):  # then runs differ for another reason, such as chance
            return None
        changes = before.changes()
    assigned = [
        (place, name, value)
        for place, values in changes
        if isinstance(place, Place)
        for name, value in values.items()
    ]
    for place, name, value in assigned[:MOST]:
        before = take_snapshot()
        # A run may fail if only one of several values is there.
        with before.undone(), contextlib.suppress(CannotCapture):
            place.apply({name: value})
            if not is_like_the_first(before):
                return place.text(name)
    return None
