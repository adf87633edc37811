"""Staging buffers: where arrays lie in them, and the order of copies and steps."""

import contextlib
import ctypes
import types
from unittest import mock

import numpy
import pytest

from chainer_bspmm.dataset import batch_form
from chainer_bspmm.dataset.batch_form import Capacity
from chainer_bspmm.training import staging

ARRAYS = {'counter': ((1,), 'u8'), 'bytes': ((3,), 'b'), 'none': ((0, 4), 'f'), 'half': ((5,), 'e')}

ARRAYS.update(matrix=((2, 3), 'd'), scalar=((), 'i'))


class Pinned(bytearray):
    """Stand-in for the result of ``cupy.cuda.alloc_pinned_memory``."""

    @property
    def ptr(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


@pytest.fixture(params=[0, staging.FEW_BYTES], ids=['copy', 'kernel'])
def staged(request, monkeypatch):
    """A `Staging` that copies from host to host, and the list of its actions."""
    calls = []

    class Event:
        def __init__(self, disable_timing):
            assert disable_timing

        def record(self, stream):
            calls.append(('record', self))

        def synchronize(self):
            calls.append(('wait', self))

    class Buffer(numpy.ndarray):
        @property
        def data(self):
            return types.SimpleNamespace(copy_from_host_async=self.copy, device_id=0)

        def copy(self, source, n_bytes):
            self[:n_bytes] = numpy.frombuffer(ctypes.string_at(source, n_bytes), numpy.uint8)
            calls.append(('copy', None))

        def get(self):
            return self

    class Device(contextlib.nullcontext):
        def synchronize(self):
            calls.append(('synchronize', None))

    runtime = types.SimpleNamespace(getDevice=lambda: 0, CUDARuntimeError=RuntimeError)
    place = types.SimpleNamespace(alloc_pinned_memory=Pinned, Event=Event, runtime=runtime)
    cupy = types.SimpleNamespace(zeros=lambda *given: numpy.zeros(*given).view(Buffer), cuda=place)
    monkeypatch.setattr(staging, 'cuda', types.SimpleNamespace(cupy=cupy))
    monkeypatch.setattr(staging, 'FEW_BYTES', request.param)
    monkeypatch.setattr(staging.kernels, 'load', lambda *_: kernel)

    def kernel(grid, block, arguments, shared_bytes):
        slots, to, n_quads, n_slots, position = arguments
        assert grid == (1, 1, 1) and block[0] <= 1024 and shared_bytes == 0
        n_bytes = staging.plans.VECTOR_BYTES * int(n_quads)
        to.copy(int(slots) + int(position[0] % n_slots) * n_bytes, n_bytes)
        position += 1

    made = staging.Staging(ARRAYS, types.SimpleNamespace(device=Device()))
    assert calls.pop() == ('synchronize', None) and not calls  # the memory is ready on any stream
    return made, calls


def test_arrays_arrive(staged):
    """`send` and `again` copy the arrays."""
    staged, _ = staged
    for number in range(1, 2 * staging.N_SLOTS + 2):
        for i, array in enumerate(staged.fill().values()):
            array[...] = number + i
        for is_again in (False, True):
            if is_again:
                staged.again()
            staged.send('the current one')
            for i, (name, (shape, dtype)) in enumerate(ARRAYS.items()):
                array = staged.device[name]
                assert array.shape == shape and array.dtype == dtype
                assert (array == number + i).all()
                assert array.ctypes.data % array.itemsize == 0


def test_the_host_waits_for_the_last_copy_from_a_group_of_slots(staged):
    staged, calls = staged
    n = staging.N_SLOTS
    slots = []
    for _ in range(4 * n):
        slots.append(id(staged.fill()))
        staged.send('the current one')
    assert slots[: 2 * n] == slots[2 * n :] and len(set(slots)) == 2 * n  # all slots in turn
    assert [call for call, _ in calls] == ['wait', *['copy'] * n, 'record'] * 4
    waited, recorded = ([event for call, event in calls if call == k] for k in ('wait', 'record'))
    assert waited == recorded and waited[:2] == waited[2:] and waited[0] is not waited[1]


def test_memory_is_given_back_when_all_copies_are_done(staged):
    staged, calls = staged
    another = staging.Staging(ARRAYS, types.SimpleNamespace(device=staged._device))
    del calls[:], another
    assert calls == [('synchronize', None)]


@pytest.mark.parametrize('was_copied', [False, True])
def test_after_an_error_the_host_asks_which_slot_is_next(staged, was_copied):
    """A signal handler, for example, may raise between `fill` and `send`."""
    staged, calls = staged
    for number in range(1, 5 * staging.N_SLOTS):
        for array in staged.fill().values():
            array[...] = number
        if number == 3:
            if was_copied:
                staged.copy()
            continue
        staged.send('the current one')
        assert all((array == number).all() for array in staged.device.values())
    assert [call for call, _ in calls].count('synchronize') == 1


def make_inputs(calls, is_few):
    """Return `Inputs` that record their actions in a list, and a batch for them."""

    class Recording(staging.Staging):
        is_kernel = is_few

        def __init__(self, arrays, device):
            self.device = {name: numpy.zeros(*spec) for name, spec in arrays.items()}

        def fill(self):
            calls.append('fill')
            return self.device

        def copy(self):
            calls.append('copy')

        def copied(self, stream):
            calls.append('copied')

    batch = types.SimpleNamespace(
        form=batch_form.Form(
            n_graphs=1,
            n_relations=1,
            is_symmetric=True,
            atoms=(numpy.dtype('i'), ()),
            data=None,
            labels=(),
            longest=128,
        ),
        gather=None,
        staged=lambda capacity: batch_form.batch_arrays(batch.form, capacity),
        write=lambda views: calls.append('write'),
    )
    capturer = types.SimpleNamespace(join=lambda: calls.append('join'))
    with mock.patch.object(staging, 'Staging', Recording):
        driver = types.SimpleNamespace(capturer=capturer, blas=None, seed=0, device=None)
        return staging.Inputs(driver, batch, Capacity(64, 64, 3, 4, 9), 2), batch


def test_a_batch_is_sent_after_the_last_step():
    """The last step may run on another stream, and still read the memory that a copy overwrites."""
    calls = []
    inputs, batch = make_inputs(calls, True)
    inputs.send(batch, 5, [1.5, 2.5])
    assert calls == ['fill', 'write', 'join', 'copy', 'copied']
    assert inputs.step.counter.tolist() == [5] and inputs.numbers.tolist() == [1.5, 2.5]


@pytest.mark.parametrize('is_few', [False, True])
def test_a_graph_fetches_few_bytes(is_few):
    calls = []
    inputs, batch = make_inputs(calls, is_few)
    inputs.fetch()
    assert calls == ['copy'] * is_few  # captured in the graph
    del calls[:]
    inputs.send(batch, 5, [1.5, 2.5], by_graph=True)
    inputs.fetched('the stream')
    assert calls == ['fill', 'write', *([] if is_few else ['join', 'copy']), 'copied']
