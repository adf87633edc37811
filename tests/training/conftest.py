"""Fixtures that several files in this folder use."""

import sys
import types

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer

from chainer_bspmm.cuda import kernels
from chainer_bspmm.training import session
from chainer_bspmm.training.cuda_graphs import Capturer
from chainer_bspmm.training.training_driver import TrainingDriver
from tests.training import host_graphs


# Files whose tests train as users do.
AS_USERS = 'test_calls', 'test_first_step', 'test_two_lines', 'test_unusual_scripts'
# Files whose tests do not depend on the check of the first step.
UNCHECKED = (
    *('test_batches', 'test_between_steps', 'test_captured_evaluators', 'test_every_model'),
    *('test_gradients', 'test_graph_updater', 'test_node_classification', 'test_watched'),
)


def file_of(request):
    """Return the name of the file of a test, without its ending."""
    return request.module.__name__.rpartition('.')[2]


@pytest.fixture(autouse=True)
def begins_at_once(request, monkeypatch):
    """Leave out the eager step that notes calls of a user's loss, so that tests need not count it.

    Files in `AS_USERS` keep that step.
    """
    if file_of(request) not in AS_USERS:
        monkeypatch.setattr(TrainingDriver, 'needs_notes', lambda self, function: False)


@pytest.fixture(autouse=True)
def without_mpi(monkeypatch):
    """Hide MPI, which a test of several ranks may have imported: with it no process is forked."""
    monkeypatch.delitem(sys.modules, 'mpi4py.MPI', raising=False)


@pytest.fixture(autouse=True)
def unchecked(request, monkeypatch):
    """Leave out the check of the first step in files that are `UNCHECKED`.

    On a host the check forks processes, which takes longer than the steps of most tests.
    """
    if file_of(request) in UNCHECKED:
        monkeypatch.setitem(vars(chainer.global_config), 'bspmm_check_swap', False)


@pytest.fixture
def graphs(device, monkeypatch):
    """List of the stand-ins that are made on the host; None on a GPU."""
    return host_graphs.stand_in(monkeypatch) if device.xp is numpy else None


@pytest.fixture
def sessions(monkeypatch):
    """List of all sessions that are made."""
    made = []

    class Noted(session.Session):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    for module in ('driver', 'prediction'):
        monkeypatch.setattr('chainer_bspmm.training.%s.Session' % module, Noted, raising=False)
    return made


@pytest.fixture
def noted(monkeypatch):
    """Function that records calls of an owner's attribute: returns a list of what `of` returns."""

    def note(owner, name, calls=None, of=lambda *args, **kwargs: args):
        calls, function = [] if calls is None else calls, getattr(owner, name)

        def called(*args, **kwargs):
            calls.append(of(*args, **kwargs))
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)
        return calls

    return note


@pytest.fixture(params=(False, True), ids=('eager update', 'fused'))
def is_fused(request, graphs, monkeypatch):
    """Whether stand-ins launch the update with the step, as a GPU always does."""
    if request.param and graphs is not None:
        host_graphs.fuse(monkeypatch)
    return request.param


@pytest.fixture
def no_causes():
    """Fail if a warning says that something could not be captured."""
    with host_graphs.eager_causes() as causes:
        yield
    assert not causes


@pytest.fixture
def fused(graphs, monkeypatch):
    """Make stand-ins launch the update with the step, as a GPU always does."""
    if graphs is not None:
        host_graphs.fuse(monkeypatch)


@pytest.fixture
def prediction_graphs(device, monkeypatch):
    """Stand-in for graphs on the host; on a GPU, counts of captures and launches of real graphs."""
    if device.xp is numpy:
        return host_graphs.stand_in_for_prediction(monkeypatch)
    counts = types.SimpleNamespace(n_captures=0, n_launches=0)
    capture = Capturer.capture

    def counted(self, function):
        replay, result = capture(self, function)
        counts.n_captures += kernels._local.together is None  # else it only compiles

        def launch():
            counts.n_launches += 1
            return replay()

        return launch, result

    monkeypatch.setattr(Capturer, 'capture', counted)
    return counts
