"""Results are copied only if somebody keeps them, not because a user's model assigns many."""

import collections
from typing import Any

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import functions as F, training
from chainer.training import extensions

from chainer_bspmm.training import GraphUpdater

from tests.support.training import is_captured, make_model, make_updater, molecules


class Own(chainer.Chain):
    """A user's Chain whose loss assigns its results to attributes by `assign`."""

    y: Any
    loss: Any

    def __init__(self, assign):
        super().__init__()
        self.assign = assign
        self.filled: dict[str, Any] = {}
        with self.init_scope():
            self.predictor = make_model().predictor

    def __call__(self, atoms, adj, t):
        y = self.predictor(atoms, adj)
        loss = F.mean_squared_error(y, t)
        self.assign(self, y, loss)
        chainer.report({'loss': loss}, self)
        return loss


def assign_variables(model, y, loss):
    model.y = y
    model.loss = loss


def assign_arrays(model, y, loss):
    model.y = y.array
    model.loss = loss.array


def assign_both(model, y, loss):
    """The array is referred to by an attribute and by a variable of another attribute."""
    model.y = y
    model.loss = loss
    model.array = y.array
    model.row = y.array[0]


def assign_dict(model, y, loss):
    assign_variables(model, y, loss)
    model.parts = {'y': y, 'loss': loss}


def assign_list(model, y, loss):
    assign_variables(model, y, loss)
    model.parts = [y, loss.array]


def assign_tuple(model, y, loss):
    assign_variables(model, y, loss)
    model.parts = y, (loss,)


def assign_filled_dict(model, y, loss):
    assign_variables(model, y, loss)
    model.filled.update(y=y, loss=loss)


ASSIGN = {
    'variables': assign_variables,
    'arrays': assign_arrays,
    'variables and their arrays': assign_both,
    'a dict': assign_dict,
    'a list': assign_list,
    'a tuple': assign_tuple,
    'items of a dict': assign_filled_dict,
}


def do_nothing(trainer):
    pass


class Reads(training.Extension):
    """Extension that reads results of each step, and keeps numbers."""

    def __init__(self, model):
        self.model = model
        self.losses = []

    def __call__(self, trainer):
        y = getattr(self.model.y, 'array', self.model.y)
        loss = getattr(self.model.loss, 'array', self.model.loss)
        self.losses.append(float(loss) + 0 * float(abs(y).sum()))


class ReadsRows(Reads):
    """Extension that has views of the result of a step for a while."""

    def __call__(self, trainer):
        rows = list(self.model.y)
        largest = max(float(abs(getattr(row, 'array', row)).max()) for row in rows)
        self.losses.append(largest)


EXTENSIONS = {
    'that does nothing': lambda model: do_nothing,
    'that reads': Reads,
    'that reads rows': ReadsRows,
}


def train(device, model, extension, folder):
    """Train, with an extension of a user's after each step; return whether steps are captured."""
    model.to_device(device)
    updater = make_updater(GraphUpdater, device, model, molecules(24), batch_size=8)
    trainer = training.Trainer(updater, (6, 'epoch'), str(folder))
    trainer.extend(extension, name='of a user', trigger=(1, 'iteration'))
    trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
    captured = []

    def note(trainer):
        captured.append(is_captured(updater))

    trainer.extend(note, trigger=(1, 'iteration'))
    trainer.run()
    return captured[-1]


@pytest.mark.parametrize('make', EXTENSIONS.values(), ids=EXTENSIONS)
@pytest.mark.parametrize('assign', ASSIGN.values(), ids=ASSIGN)
def test_nothing_is_copied_if_an_extension_keeps_nothing(
    device, graphs, sessions, tmp_path, assign, make
):
    model = Own(assign)
    assert train(device, model, make(model), tmp_path)
    assert sessions and not any(each.gives_copies for each in sessions)


def test_nothing_is_copied_of_a_stock_model_if_an_extension_reads_its_metrics(
    device, graphs, sessions, tmp_path
):
    model = make_model()
    metrics = []

    def read(trainer):
        metrics.append(float(model.metrics['mae']))

    assert train(device, model, read, tmp_path)
    assert sessions and not any(each.gives_copies for each in sessions)
    assert len(set(metrics)) > 12


def test_nothing_is_copied_if_a_loop_keeps_copies(device, graphs, sessions):
    model = Own(assign_variables)
    updater = make_updater(GraphUpdater, device, model)
    kept = []
    for _ in range(12):
        updater.update()
        kept.append(model.y.array.copy())
    assert is_captured(updater) and not any(each.gives_copies for each in sessions)
    assert len({array.tobytes() for array in kept}) == len(kept)


def test_nothing_is_copied_if_a_loop_deletes_results(device, graphs, sessions):
    model = Own(assign_variables)
    updater = make_updater(GraphUpdater, device, model)
    losses = collections.deque(maxlen=4)
    for _ in range(12):
        updater.update()
        losses.append(float(model.loss.array))
        del model.y
    assert is_captured(updater) and not any(each.gives_copies for each in sessions)
    assert numpy.isfinite(losses).all()


KEEP = {
    'an output': lambda model: model.y,
    'its array': lambda model: model.y.array,
    'a row': lambda model: model.y.array[0],
    'a loss': lambda model: model.loss,
}


@pytest.mark.parametrize('keep', KEEP.values(), ids=KEEP)
def test_results_are_copied_if_an_extension_keeps(device, graphs, sessions, tmp_path, keep):
    model = Own(assign_variables)
    kept = []
    assert train(device, model, lambda trainer: kept.append(keep(model)), tmp_path)
    assert any(each.gives_copies for each in sessions)
    arrays = [getattr(each, 'array', each) for each in kept]
    assert len({array.tobytes() for array in arrays}) == len(kept)
