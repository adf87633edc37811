"""The buffer of a step and its pinned copies: where arrays lie in them, and who waits for whom."""

import contextlib
import types

import numpy
import pytest

from chainer_bspmm.training import staging

ARRAYS = {
    'counter': ((1,), 'u8'),
    'bytes': ((3,), 'b'),
    'none': ((0, 4), 'f'),
    'half': ((5,), 'e'),
    'matrix': ((2, 3), 'd'),
    'scalar': ((), 'i'),
}


class Pinned(bytearray):
    """What ``cupy.cuda.alloc_pinned_memory`` returns; its address is itself."""

    @property
    def ptr(self):
        return self


@pytest.fixture
def staged(monkeypatch):
    """A `Staging` between two places on the host, and the list of what it does there."""
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
            return types.SimpleNamespace(copy_from_host_async=self.copy)

        def copy(self, source, n_bytes, stream):
            assert stream == 'the current one'
            self[:n_bytes] = numpy.frombuffer(source, numpy.uint8, n_bytes)
            calls.append(('copy', None))

    monkeypatch.setattr(
        staging,
        'cuda',
        types.SimpleNamespace(
            cupy=types.SimpleNamespace(
                zeros=lambda *arguments: numpy.zeros(*arguments).view(Buffer),
                cuda=types.SimpleNamespace(
                    alloc_pinned_memory=Pinned,
                    Event=Event,
                    get_current_stream=lambda: 'the current one',
                ),
            )
        ),
    )
    device = types.SimpleNamespace(device=contextlib.nullcontext())
    return staging.Staging(ARRAYS, device), calls


def test_arrays_arrive(staged):
    staged, _ = staged
    for number in range(1, 4):
        for i, array in enumerate(staged.fill().values()):
            array[...] = 10 * number + i
        staged.send()
        for i, (name, (shape, dtype)) in enumerate(ARRAYS.items()):
            array = staged.device[name]
            assert array.shape == shape and array.dtype == dtype
            assert (array == 10 * number + i).all()
            assert array.ctypes.data % array.itemsize == 0


def test_the_host_waits_for_the_copy_before_the_last(staged):
    staged, calls = staged
    for _ in range(5):
        staged.fill()
        staged.send()
    assert [call for call, _ in calls] == ['wait', 'copy', 'record'] * 5
    waited, recorded = (
        [event for call, event in calls if call == kind] for kind in ('wait', 'record')
    )
    assert waited == recorded and waited[:3] == waited[2:]  # two events, in turn
    assert waited[0] is not waited[1]
