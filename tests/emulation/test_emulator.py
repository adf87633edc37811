"""Tests of the emulator: kernels that it runs, and faults that it reports."""

import numpy
import pytest

from chainer_bspmm.ops.bspmm import bspmm_forward
from tests.emulation.emulator.cuda_on_cpu import build, knows, run, MEMORY, RACES, KernelError
from tests.emulation.kernel_cases import batch
from tests.support.devices import slow_unless

pytestmark = pytest.mark.usefixtures('gxx')

BLOCK_SUM = """
extern "C" __global__ void block_sum(const int *x, int *y)
{
    __shared__ int part[64];
    part[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x >= step) return;  // and is not waited for any more
        part[threadIdx.x] += part[threadIdx.x + step];
    }
    y[blockIdx.x] = part[0];
}
"""

SHIFT_LANES = """
extern "C" __global__ void shift_lanes(const double *x, double *y)
{
    const unsigned lane = threadIdx.x % 32, i = threadIdx.x + blockDim.x * threadIdx.y;
    const unsigned mask = 0xFFu << (lane & ~7u);
    double value = x[i];
    // Groups of lanes differ in how often they come here.
    for (unsigned times = 0; times <= i / 8 % 3; ++times)
        value = __shfl_down_sync(mask, value, 3, 8);
    y[i] = value;
}
"""

HANG = """
extern "C" __global__ void hang(int *y)
{
    if (threadIdx.x) __syncthreads(); else *y = __shfl_down_sync(3u, 1, 1);
}
"""


def run_block_sum(text, sanitizer=None):
    x = numpy.arange(128, dtype=numpy.int32)
    y = numpy.zeros(2, numpy.int32)
    run(build(text, 'block_sum', (), sanitizer), (2, 1, 1), (64, 1, 1), (x, y))
    numpy.testing.assert_array_equal(y, x.reshape(2, 64).sum(axis=1))


def test_sum_in_shared_memory_behind_a_barrier():
    run_block_sum(BLOCK_SUM)


@pytest.mark.parametrize(
    'grid, block, shared_bytes',
    [((2.0, 1, 1), (64, 1, 1), 0), ((2, 1, 1), (64, 1.0, 1), 0), ((2, 1, 1), (64, 1, 1), 8.0)],
    ids=['grid', 'block', 'shared memory'],
)
def test_sizes_of_a_launch_are_whole_numbers(grid, block, shared_bytes):
    x = numpy.arange(128, dtype=numpy.int32)
    with pytest.raises(TypeError, match="^'float' object cannot be interpreted as an integer$"):
        run(build(BLOCK_SUM, 'block_sum'), grid, block, (x, x), shared_bytes)


def test_missing_barrier_is_a_race():
    if not knows(sanitizer=RACES):
        pytest.skip('g++ -fsanitize=thread does not work here')
    run_block_sum(BLOCK_SUM, RACES)
    with pytest.raises(KernelError, match='data race'):
        for _ in range(20):
            run_block_sum(BLOCK_SUM.replace('__syncthreads();', ''), RACES)


def test_shuffle_within_parts_of_a_warp():
    x, y = numpy.arange(64.0), numpy.zeros(64)
    run(build(SHIFT_LANES, 'shift_lanes'), (1, 1, 1), (32, 2, 1), (x, y))
    expected = x.reshape(8, 8)
    for group, values in enumerate(expected):
        for _ in range(group % 3 + 1):
            values[:5] = values[3:].copy()
    numpy.testing.assert_array_equal(y, expected.ravel())


@pytest.mark.parametrize(
    'mask, report',
    [
        ('3u', 'deadlock'),
        ('2u', 'leaves out the lane that calls'),
        ('1u', 'leaves out the lane that is read'),
    ],
)
def test_shuffle_that_a_gpu_leaves_undefined(mask, report):
    with pytest.raises(KernelError, match=report):
        kernel = build(HANG.replace('3u', mask), 'hang')
        run(kernel, (1, 1, 1), (32, 1, 1), (numpy.zeros(1, numpy.int32),))


SHARED = """
extern "C" __global__ void shared(int *y)
{
    __shared__ int sum;
    y[blockIdx.x] = sum;
    sum = 7;
}
"""


def test_shared_memory_is_poisoned_for_every_block():
    """A block finds poison instead of the values that another block has left."""
    y = numpy.zeros(3, 'i')
    run(build(SHARED, 'shared'), (3, 1, 1), (1, 1, 1), (y,))
    numpy.testing.assert_array_equal(y, [-1] * 3)


ORDER = """
extern "C" __global__ void order(int *y)
{
    y[%s] = threadIdx.x + 10 * blockIdx.x;
}
"""


@pytest.mark.parametrize(
    'place, report',
    [
        ('blockIdx.x', 'depends on the order of the threads'),
        ('threadIdx.x', 'two blocks write byte 0'),
        ('4 * blockIdx.x + threadIdx.x + 1', 'a byte was written after'),
        ('int(4 * blockIdx.x + threadIdx.x) - 1', 'a byte was written before'),
        ('(1 << 28) + threadIdx.x', 'access to memory of no array'),
    ],
)
def test_writes_that_a_gpu_leaves_undefined(place, report):
    kernel = build(ORDER % place, 'order')
    with pytest.raises(KernelError, match=report):
        run(kernel, (2, 1, 1), (4, 1, 1), (numpy.full(8, 99, 'i'),))


def test_missing_barrier_is_a_matter_of_order():
    with pytest.raises(KernelError, match='depends on the order of the threads'):
        run_block_sum(BLOCK_SUM.replace('__syncthreads();', ''))


def test_an_array_is_as_it_was_after_a_failed_run():
    y = numpy.full(8, 99, 'i')
    with pytest.raises(KernelError):
        run(build(ORDER % 'threadIdx.x', 'order'), (2, 1, 1), (4, 1, 1), (y,))
    assert (y == 99).all()


@pytest.mark.parametrize('sanitizer', [None, slow_unless(False, MEMORY)])
def test_vector_that_is_not_aligned_is_noticed(make_device, monkeypatch, sanitizer):
    monkeypatch.setattr('chainer_bspmm.cuda.plans.widest_vector', lambda *_: 4)
    device = make_device(sanitizer)
    adj = batch('small', 'f')
    x = device.put(numpy.zeros((adj.n_cols, 8), 'f'), shift=4)
    with pytest.raises(KernelError, match='misaligned address' if sanitizer else 'not aligned'):
        bspmm_forward(adj, x, None, None, False)
