"""Sums of reported values: on a host in float64, on a GPU as Chainer's with fewer copies."""

import contextlib
import json
import types

import numpy
import pytest

from chainer_bspmm.compat import late_sums  # repairs Chainer before anything imports it
import chainer
from chainer.backends import cuda


class _OnDevice(numpy.ndarray):
    """Stand-in for a CuPy array of one device."""

    device = contextlib.nullcontext()

    @property
    def data(self):
        memory = self if self.base is None else self.base
        return types.SimpleNamespace(mem=memory, ptr=self.ctypes.data)

    def get(self):
        return numpy.array(self)


@pytest.fixture
def fetches(monkeypatch):
    """Numbers of stand-ins for CuPy arrays that Summary has fetched each time."""
    numbers = []

    def stack(arrays):
        numbers.append(len(arrays))
        return numpy.stack(arrays).view(_OnDevice)

    monkeypatch.setattr(cuda, 'ndarray', _OnDevice)
    monkeypatch.setattr(cuda, 'cupy', types.SimpleNamespace(stack=stack))
    monkeypatch.setattr(cuda, 'to_cpu', numpy.array)
    return numbers


def values_of(dtype, n):
    return [numpy.array(x, dtype) for x in numpy.random.RandomState(0).lognormal(size=n)]


def upstream(values):
    """Compute mean and deviation like Chainer's Summary with arrays of a device."""
    x = x2 = values[0].dtype.type(0)
    for value in values:
        x = numpy.add(x, value)
        x2 = numpy.add(x2, value * value)
    mean = x / len(values)
    return mean, numpy.sqrt(x2 / len(values) - mean * mean)


@pytest.mark.parametrize('dtype', ('f2', 'f4', 'f8'))
def test_the_numbers_of_chainer(fetches, dtype):
    values = values_of(dtype, 2500)
    summary = chainer.reporter.Summary()
    for value in values:
        summary.add(value.view(_OnDevice))
    mean, deviation = upstream(values)
    assert summary.compute_mean() == mean and summary.make_statistics() == (mean, deviation)
    assert summary.compute_mean().dtype == mean.dtype  # NumPy 1 divides by an int in float64
    assert fetches == [late_sums.MOST, late_sums.MOST, 2500 - 2 * late_sums.MOST]


def test_a_value_that_is_overwritten(fetches):
    counter = numpy.zeros((), 'f').view(_OnDevice)
    summary = chainer.reporter.DictSummary()
    for _ in range(3):
        counter[...] += 1
        summary.add({'counter': counter, 'variable': chainer.Variable(counter)})
    assert summary.compute_mean() == {'counter': 2, 'variable': 2}


def test_values_that_last_are_not_copied(fetches, monkeypatch):
    rows = numpy.ndarray.__new__(_OnDevice, (3, 1), 'f')
    summary = chainer.reporter.Summary()
    rows[...] = numpy.array([[1], [2], [6]])
    late_sums.never_overwritten(rows)
    with monkeypatch.context() as patched:
        patched.setattr(_OnDevice, 'copy', None)
        for row in rows:
            summary.add(row[0:1].reshape(()))
    del rows, row
    summary.add(numpy.full((), 7, 'f').view(_OnDevice))
    assert summary.compute_mean() == 4 and not late_sums._lasting


def test_values_on_host_and_device_keep_their_places_in_the_sum(fetches):
    values = [numpy.float32(1e8), numpy.float32(1), numpy.float32(-1e8), numpy.float32(3)]
    summary = chainer.reporter.Summary()
    for i, value in enumerate(values):
        summary.add(numpy.array(value).view(_OnDevice) if i % 2 else value)
    expected = numpy.float64(0)  # the first value is on the host
    for value in values:
        expected = expected + value
    assert summary.compute_mean() == expected / len(values)


def test_weights_and_values_of_other_types(fetches):
    summary = chainer.reporter.DictSummary()
    for value, weight in ((2.0, 3), (4.0, 1)):
        on_device = [numpy.array(x, 'f').view(_OnDevice) for x in (value, weight)]
        summary.add({'a': (on_device[0], weight), 'b': (value, on_device[1])})
        summary.add({'n': numpy.array(weight, 'i').view(_OnDevice)})
        summary.add({'no number': numpy.zeros(1, 'f').view(_OnDevice)})
    assert summary.compute_mean() == {'a': 2.5, 'b': 2.5, 'n': 2}


def test_a_sum_in_float64_keeps_its_precision(fetches):
    summary = chainer.reporter.Summary()
    summary.add(numpy.float64(1e8))
    summary.add(numpy.array(1, 'f').view(_OnDevice))
    assert float(summary.compute_mean()) == (1e8 + 1) / 2


def test_values_on_the_host_are_added_as_ever():
    summary = chainer.reporter.Summary()
    for value in (0.1, 0.2, 0.3):
        summary.add(value)
    assert summary._x == 0.1 + 0.2 + 0.3 and type(summary.compute_mean()) is float


def test_snapshots(fetches, tmp_path):
    def add(summary, values):
        for value in values:
            summary.add({'loss': value.view(_OnDevice)})
        return summary

    values = values_of('f', 30)
    half = add(chainer.reporter.DictSummary(), values[:20])
    chainer.serializers.save_npz(tmp_path / 'summary.npz', half)
    again = add(chainer.reporter.DictSummary(), values[:3])
    chainer.serializers.load_npz(tmp_path / 'summary.npz', again)
    for summary in (half, again):
        assert add(summary, values[20:]).compute_mean() == {'loss': upstream(values)[0]}


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', ('f2', 'f4', 'f8'))
def test_on_a_gpu(dtype):
    values = [cuda.to_gpu(value) for value in values_of(dtype, 2500)]
    summary = chainer.reporter.Summary()
    x = x2 = 0.0
    for value in values:
        summary.add(value)
        x += 1 * value
        x2 += 1 * value * value
    mean = x / len(values)
    expected = mean, cuda.cupy.sqrt(x2 / len(values) - mean * mean)
    for found, value in zip(summary.make_statistics(), expected):
        assert isinstance(found, numpy.generic) and found.dtype == value.dtype
        assert found == value.get()


@pytest.mark.parametrize('as_reported', [numpy.float32, numpy.array])
def test_sums_on_a_host_are_in_float64(as_reported):
    values = numpy.float32(100) + numpy.random.RandomState(0).normal(0, 0.01, 1000).astype('f')
    summary = chainer.reporter.DictSummary()
    for value in values:
        summary.add({'x': as_reported(value)})
    found = summary.make_statistics()
    exact = values.astype('d')
    assert found['x'] == pytest.approx(exact.mean(), rel=1e-14)
    assert found['x.std'] == pytest.approx(exact.std(), rel=1e-6)
    assert json.loads(json.dumps(summary.compute_mean())) == {'x': found['x']}


def test_a_sum_on_a_host_goes_on_in_float64(tmp_path):
    summary, other = chainer.reporter.Summary(), chainer.reporter.Summary()
    summary.add(numpy.float32(1))
    chainer.serializers.save_npz(tmp_path / 'summary.npz', summary)
    chainer.serializers.load_npz(tmp_path / 'summary.npz', other)
    other.add(numpy.float32(1e-9))
    assert other.compute_mean() == (1 + float(numpy.float32(1e-9))) / 2


def test_arrays_are_summed_in_their_dtype():
    summary = chainer.reporter.Summary()
    summary.add(numpy.ones(2, 'f'))
    assert numpy.asarray(summary._x).dtype == 'f'
