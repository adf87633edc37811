"""Progress bars are shown only on a terminal."""

import io
import sys

import pytest

from chainer_bspmm.dataset import progress as module
from chainer_bspmm.dataset.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, 'stderr', terminal)
    with progress(10, 'title') as advance:
        advance(10)
    assert terminal.getvalue().startswith('\rtitle:   0%')


CLOSED = io.StringIO()
CLOSED.close()


@pytest.mark.parametrize('stderr', [None, io.StringIO(), object(), CLOSED])
def test_no_bar_without_a_terminal(monkeypatch, stderr):
    """There is no bar at all, because even a disabled one needs a thread and a semaphore."""
    monkeypatch.setattr(module, 'tqdm', None)
    monkeypatch.setattr(sys, 'stderr', stderr)
    with progress(10, 'title') as advance:
        advance(10)
