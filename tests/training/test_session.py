"""`Session`: changes that end a session, and changes that lead to another key."""

import re
import types

import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
from chainer import optimizer_hooks, optimizers

from chainer_bspmm.cuda import gemm
from chainer_bspmm.training import GraphUpdater
from chainer_bspmm.training.session import Session
from chainer_bspmm.training.update import Update
from tests.support.training import make_updater, small_model, run

DECAY = optimizer_hooks.WeightDecay(0.1)


def rule_of(model):
    return model.predictor.inner.embed.W.update_rule


def another_rule(model, optimizer):
    model.predictor.inner.embed.W.update_rule = optimizers.SGD().create_update_rule()


@pytest.fixture
def begun(device, graphs):
    """A model, its optimizer, and a session of both."""
    model = small_model()
    model.to_device(device)
    optimizer = optimizers.MomentumSGD().setup(model)
    return model, optimizer, Session(device, model, model, optimizer)


ENDS = {
    'an update rule': another_rule,
    'a hook of the optimizer': lambda _, optimizer: optimizer.add_hook(DECAY),
    'a hook of an update rule': lambda model, _: rule_of(model).add_hook(DECAY),
}


@pytest.mark.parametrize('end', ENDS.values(), ids=ENDS)
def test_it_is_over(begun, end):
    model, optimizer, session = begun
    assert session.key(model, model) is not None
    end(model, optimizer)
    assert session.key(model, model) is None


def test_it_is_over_for_another_function_or_target(begun):
    model, _, session = begun
    assert session.key(model, model.__call__) is None
    assert session.key(small_model(), model) is None
    assert session.key(model, model) is not None


def test_it_is_over_with_its_update(begun):
    model, optimizer, session = begun
    session.update = Update(optimizer)
    assert session.key(model, model) is not None
    session.update.is_over = True
    assert session.key(model, model) is None


GOES_ON = {
    'an attribute': lambda model, _: setattr(model.predictor, 'counter', 1),
    'a parameter': lambda model, _: setattr(
        model.predictor.inner.embed.W, 'array', model.predictor.inner.embed.W.array.copy()
    ),
    'a rule that is disabled': lambda model, _: model.predictor.inner.disable_update(),
}


@pytest.mark.parametrize('change', GOES_ON.values(), ids=GOES_ON)
def test_it_goes_on_with_another_key(begun, change):
    model, optimizer, session = begun
    before = session.key(model, model)
    change(model, optimizer)
    after = session.key(model, model)
    assert after is not None and after != before


def test_hyperparameters_are_no_part_of_its_key(begun):
    """Hyperparameters are sent with every batch."""
    model, optimizer, session = begun
    before = session.key(model, model)
    optimizer.lr = 0.5
    assert session.key(model, model) is before


def test_products_run_on_the_stream_of_the_graphs(device, graphs, monkeypatch):
    used = []
    monkeypatch.setattr(gemm, 'Blas', lambda: types.SimpleNamespace(use=used.append))
    model = small_model()
    model.to_device(device)
    session = Session(device, model, model)
    assert used == [session.capturer.stream]


def test_no_cublas(device, graphs, monkeypatch):
    def fails():
        raise FileNotFoundError('/proc/self/maps')

    monkeypatch.setattr(gemm, 'Blas', fails)
    updater = make_updater(GraphUpdater, device)
    message = (
        'GraphUpdater trains eagerly: no cuBLAS handle could be made with the library that CuPy '
        "has loaded: FileNotFoundError('/proc/self/maps')"
    )
    with pytest.warns(UserWarning, match='^%s$' % re.escape(message)):
        run(updater, 2)
    assert updater._driver.session is None
