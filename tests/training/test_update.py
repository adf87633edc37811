"""`Update`: the kind that an optimizer gets, and the count of steps, which are counted once."""

import re

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer import optimizers

from chainer_bspmm.training import update
from chainer_bspmm.training.cuda_graphs import CannotCapture
from tests.training import host_graphs

NO_METHOD = (
    'the optimizer is chainer.optimizers.ada_delta.AdaDelta, expected one of AMSGrad, Adam, AdamW, '
    'MomentumSGD, RMSprop, SGD'
)


def optimizer_of(make=optimizers.SGD):
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(numpy.ones(3, 'f'))
    link.w.grad = numpy.full(3, 0.5, 'f')
    return make().setup(link)


def counts(optimizer):
    """Return the set of the counts of steps of the optimizer and of its update rules."""
    return {optimizer.t, *(param.update_rule.t for param in optimizer.target.params())}


def test_what_kernels_exist_for_is_one_launch():
    made = update.update_of(optimizer_of())
    assert type(made) is update.OneLaunch and made.reason is None
    assert made.n_numbers == 1 and not made.has_others


def test_any_other_optimizer_updates_by_itself():
    made = update.update_of(optimizer_of(optimizers.AdaDelta))
    assert type(made) is update.Update and made.reason == NO_METHOD
    assert made.n_numbers is None and made.advance() is None and made.variants() is None


def test_ranks_cannot_be_captured_with_an_optimizer_that_updates_by_itself():
    message = '^the update of several ranks is captured, but %s$' % re.escape(NO_METHOD)
    with pytest.raises(CannotCapture, match=message):
        update.update_of(optimizer_of(optimizers.AdaDelta), together=object())


def test_an_eager_update_is_that_of_the_optimizer():
    optimizer = optimizer_of(lambda: optimizers.SGD(0.1))
    made = update.Update(optimizer)
    made.advance()
    assert counts(optimizer) == {0}
    made.launch(None)
    assert made.finish()  # the optimizer's own code has run
    assert counts(optimizer) == {1}
    numpy.testing.assert_allclose(optimizer.target.w.array, 0.95)


@pytest.fixture
def fused(monkeypatch):
    """An optimizer, and its `OneLaunch` on the host."""
    host_graphs.fuse(monkeypatch)
    optimizer = optimizer_of(lambda: optimizers.SGD(0.1))
    return optimizer, update.OneLaunch(optimizer)


def test_a_launch_is_counted_before(fused):
    optimizer, made = fused
    made.prepare()
    numbers = made.advance()
    assert numbers.tolist() == [0.1] and counts(optimizer) == {1}
    made.launch(numbers)
    assert not made.finish()
    assert counts(optimizer) == {1}
    numpy.testing.assert_allclose(optimizer.target.w.array, 0.95)


@pytest.mark.parametrize('is_done', (False, True))
@pytest.mark.parametrize('was_counted', (False, True))
def test_after_an_error_a_step_counts_if_it_was_done(fused, is_done, was_counted):
    optimizer, made = fused
    for _ in range(4):
        made.advance()
    if was_counted:
        made.advance()
    made.recount(4, is_done)
    assert counts(optimizer) == {4 + is_done}


def test_python_reads_counters_as_before_the_step(fused):
    optimizer, made = fused
    for _ in range(3):
        made.advance()
    with made.uncounted():
        assert counts(optimizer) == {2}
    assert counts(optimizer) == {3}
    with pytest.raises(LookupError, match='^mine$'), made.uncounted():
        raise LookupError('mine')
    assert counts(optimizer) == {3}


def test_a_trial_reads_counters_of_a_step_that_is_not_counted_yet(fused):
    optimizer, made = fused
    made.advance()
    made.finish()
    with made.uncounted():
        assert counts(optimizer) == {1}


@pytest.mark.parametrize('is_done', (False, True))
def test_a_trial_after_an_error_reads_the_counters_that_were_put_right(fused, is_done):
    optimizer, made = fused
    made.advance()
    made.recount(0, is_done)
    with made.uncounted():
        assert counts(optimizer) == {int(is_done)}


def test_a_parameter_that_no_kernel_updates_ends_it(monkeypatch):
    """If a step has made such a parameter, the optimizer updates by itself, and counts once."""
    optimizer = optimizer_of(lambda: optimizers.SGD(0.1))
    link = optimizer.target
    made = update.OneLaunch(optimizer)
    with link.init_scope():
        link.late = chainer.Parameter(numpy.ones(2, 'e'))
    link.late.grad = numpy.ones(2, 'e')
    optimizer.setup(link)
    numbers = made.advance()
    made.prepare()
    assert made.is_over
    assert made.reason == "parameter '/late' is float16, expected float32 or float64"
    made.launch(numbers)
    numpy.testing.assert_array_equal(link.w.array, 1)
    assert made.finish()
    assert counts(optimizer) == {1}
    numpy.testing.assert_allclose(link.w.array, 0.95)
