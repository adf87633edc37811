"""The means by which the kernels run on a CPU: that they find what they are there to find."""

from unittest import mock

import numpy
import pytest

from chainer_bspmm import BatchedCOO
from chainer_bspmm import BatchedCSR
from chainer_bspmm import BatchedSELL
from chainer_bspmm import reference
from chainer_bspmm.backend import gpu
from chainer_bspmm.cuda import policy
from chainer_bspmm.sparse import build as build_module
from tests.support import shuffled

from tests.emulation.emulator.cuda_on_cpu import MEMORY, RACES, KernelError
from tests.emulation.emulator.cuda_on_cpu import build, knows, run
from tests.emulation.kernel_cases import batch, integers
from tests.emulation.test_transpose_csr import transpose_on

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
    x, y = numpy.arange(128, dtype=numpy.int32), numpy.zeros(2, numpy.int32)
    run(build(text, 'block_sum', (), sanitizer), (2, 1, 1), (64, 1, 1), (x, y))
    numpy.testing.assert_array_equal(y, x.reshape(2, 64).sum(axis=1))


def test_barrier_and_shared_memory():
    run_block_sum(BLOCK_SUM)


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
        run(
            build(HANG.replace('3u', mask), 'hang'),
            (1, 1, 1),
            (32, 1, 1),
            (numpy.zeros(1, numpy.int32),),
        )


def product(device):
    adj = batch('mixed', 'f')
    x = device.put(integers((adj.n_cols, 8), 'f', seed=2))
    return gpu.bspmm(adj, x, None, None, False), reference.bspmm(adj, x)


def pipelined(device):
    """Two vectors a thread, which goes through up to four rows."""
    adj = batch('mixed', 'f')
    x = device.put(integers((adj.n_cols, 24), 'f', seed=2))
    plan = policy.csr_launch(
        adj.n_rows, adj.n_cols, 24, 4, lanes=3, columns=2, rows_per_thread=4, block=9
    )
    with mock.patch.object(policy, 'bspmm_launch', lambda *_: plan):
        return gpu.bspmm(adj, x, None, None, False), reference.bspmm(adj, x)


def sampled(device):
    adj = batch('mixed', 'f')
    u, v = (device.put(integers((adj.n_rows, 36), 'f', seed=seed)) for seed in (2, 3))
    return gpu.bsddmm(adj, u, v), reference.bsddmm(adj, u, v)


def maximum(device):
    """Two lanes a segment, of which one has nothing to do in the second."""
    offsets = numpy.array([0, 19, 20], numpy.int32)
    x = device.put(-1 - abs(integers((20, 8), 'f')))
    x[3] = numpy.nan
    return gpu.segment_max(x, offsets), reference.segment_max(x, offsets)


def long_segments(device):
    """One that begins within a chunk of 256 rows and ends with one, and the other way about."""
    offsets = numpy.array([0, 9, 512, 800, 900], numpy.int32)
    x = device.put(integers((900, 33), 'f'))
    return gpu.segment_sum(x, offsets), reference.segment_sum(x, offsets)


def broadcast(device):
    offsets = numpy.array([0, 0, 9, 12], numpy.int32)
    y = device.put(integers((3, 8), 'f'))
    expected = numpy.pad(reference.segment_broadcast(y, offsets), ((0, 2), (0, 0)))
    return gpu.segment_broadcast(y, offsets, 14), expected


def long_broadcast(device):
    offsets = numpy.array([0, 9, 330, 700], numpy.int32)
    y = device.put(integers((3, 3), 'f'))
    return gpu.segment_broadcast(y, offsets, 700), reference.segment_broadcast(y, offsets)


def transposed(device):
    """Row bounds, columns and the order of the entries of the transpose, two warps a block."""
    indices = numpy.arange(150, dtype=numpy.int32) ** 2 % 40
    adj = BatchedCSR(numpy.array([0, 3, 3, 150] + [150] * 37), indices, numpy.array([0, 40]))
    return numpy.concatenate(transpose_on(device, adj)), numpy.concatenate(
        build_module.transpose(numpy, adj.indptr, adj.indices, 40)
    )


def sampled_coo(device):
    adj = shuffled(BatchedCOO.from_csr(batch('mixed', 'f')))
    u, v = (device.put(integers((adj.n_rows, 36), 'f', seed=seed)) for seed in (2, 3))
    return gpu.bsddmm(adj, u, v), reference.bsddmm(adj, u, v)


def sliced(device):
    """Slices of up to 64 rows, two warps each."""
    adj = BatchedCSR.from_matrices([integers((n, n), 'f') for n in (35, 3)])
    x, y = (device.put(integers((adj.n_cols, 9), 'f', seed=seed)) for seed in (2, 3))
    return gpu.bspmm(BatchedSELL(adj, 64, True), x, None, y, False), reference.bspmm(
        adj, x, residual=y
    )


def in_place(matrix):
    def calculate(device):
        adj = batch('mixed', 'f')
        x, y = (device.put(integers(adj.n_cols, 'f', seed=seed)) for seed in (2, 3))
        expected = reference.spmv(adj, x, 2, 3, y)
        return gpu.spmv(matrix(adj), x, 2, 3, y), expected

    return calculate


# The only one of its conditions that guards a load.
PADDED_GATHER = """if (from[u] >= 0 && c + t < n_vectors)
                        gathered"""
sliced_vector = in_place(lambda adj: BatchedSELL(adj, 7))
vector = in_place(lambda adj: adj)


@pytest.mark.parametrize(
    'calculate, old, new',
    [
        (product, 'indices[at]', 'indices[k]'),
        (product, 'left > 0; k += AHEAD', 'left > 1; k += AHEAD'),
        (product, 'c >= n_vectors)', 'c + 1 >= n_vectors)'),
        (pipelined, 'entries = next;', ''),
        (pipelined, 'next_left = later_end - later_k;', 'next_left = 0;'),
        (pipelined, 'row >= stop', 'row + step >= stop'),
        (sampled, 'step = LANES / 2', 'step = LANES / 4'),
        (sampled, 'c = threadIdx.x;', 'c = 0;'),
        (sampled_coo, 'step = LANES / 2', 'step = LANES / 4'),
        (sampled_coo, 'c = threadIdx.x;', 'c = 0;'),
        (sampled_coo, 'ids[2 * k + 1]', 'ids[2 * k]'),
        (maximum, '|| value != value', ''),
        (maximum, 'if (u == 0 && i == lane)', 'if (false)'),
        (maximum, 'lane + step < count', 'true'),
        (long_segments, 'i == 0 && begin > first ? n_chunks : 0', '0'),
        (long_segments, 'side ? stop - 1 : first)', 'first)'),
        (long_segments, '(end < stop ? end : stop) - begin', 'stop - begin'),
        (long_segments, 'if (begin < first) begin = first;', ''),
        (long_segments, '(end - 1) / chunk', 'end / chunk - 1'),
        (long_segments, 'offsets[middle + 1] <= row', 'offsets[middle + 1] < row'),
        (broadcast, 'i += blockDim.y', 'i += 2 * blockDim.y'),
        (long_broadcast, 'end - begin <= chunk', 'true'),
        (long_broadcast, 'part ? stop - 1 : first', 'first'),
        (transposed, 'mine[column] + before', 'mine[column]'),
        (transposed, 'i <= n_all_cols', 'i < n_all_cols'),
        (transposed, 'place += warp_total[w]', 'place += 0'),
        (sliced, 'row_order ? row_order[first_row + place]', 'row_order ? first_row + place'),
        (sliced, 'warp % warps * 32', '0'),
        (sliced, 'for (int c = blockIdx.y * TILE; c', 'for (int c = blockIdx.y * TILE; c + 1'),
        (sliced_vector, 'sum[t][e] *= alpha', ''),
        (sliced_vector, 'if (beta != 0)', 'if (false)'),
        (sliced_vector, 'AHEAD * height', 'AHEAD'),
        (vector, 'sum *= alpha', ''),
        (vector, 'if (beta != 0)', 'if (false)'),
        (vector, 'k += AHEAD * LANES', 'k += LANES'),
    ],
)
def test_wrong_result_is_noticed(make_device, calculate, old, new):
    result, expected = calculate(make_device(replace=(old, new)))
    assert not numpy.array_equal(result, expected.astype('f'), equal_nan=True)


@pytest.mark.parametrize(
    'sanitizer, report', [(None, 'a byte was written after'), (MEMORY, 'AddressSanitizer')]
)
@pytest.mark.parametrize(
    'calculate, old, new',
    [
        (product, 'row >= n_rows', 'row > n_rows'),
        (maximum, 'y[to * n_vectors', 'y[(to + 1) * n_vectors'),
        (broadcast, 'i < end;', 'i <= end;'),
    ],
)
def test_row_too_many_is_noticed(make_device, calculate, old, new, sanitizer, report):
    with pytest.raises(KernelError, match=report):
        calculate(make_device(sanitizer, (old, new)))


@pytest.mark.parametrize(
    'calculate, old, new',
    [
        (product, 'x[(OFFSET)entries', 'x[1 + (OFFSET)entries'),
        (product, '(left - 1 < u ? left - 1 : u)', 'u'),
        (pipelined, 'row + 2 * step < stop', 'true'),
        (pipelined, 'after : n_rows;', 'after : n_rows + 1;'),
        (sampled, 'n < end - k ? indices[k + n]', 'true ? indices[k + n]'),
        (maximum, 'at(i + u * lanes);', 'at(i + u * lanes + 12);'),
        (broadcast, 'if (segment < n_segments) value', 'value'),
        (maximum, 'to < n_segments', 'to <= n_segments'),
        (transposed, 'if (lane >= step) sum', 'sum'),
        (transposed, 'entry < end ? indices', 'true ? indices'),
        (sliced, 'place >= height', 'false'),
        (sliced_vector, 'slice >= n_slices', 'slice > n_slices'),
        (sampled_coo, 'k >= entry_offsets', 'k > entry_offsets'),
        (transposed, 'shared + n_entries;', 'shared + n_entries + 1;'),
        (vector, 'row >= n_rows', 'row > n_rows'),
        (sliced_vector, 'at < end ? column[at]', 'true ? column[at]'),
        (sliced_vector, PADDED_GATHER, PADDED_GATHER.replace('from[u] >= 0', 'true')),
        (vector, 'at < end ? indices[at]', 'true ? indices[at]'),
    ],
)
def test_reading_outside_is_noticed(make_device, calculate, old, new):
    with pytest.raises(KernelError, match='AddressSanitizer'):
        calculate(make_device(MEMORY, (old, new)))


def test_vector_that_is_not_aligned_is_noticed(make_device, monkeypatch):
    monkeypatch.setattr(policy, 'vector_width', lambda *_: 4)
    device = make_device(MEMORY)
    adj = batch('small', 'f')
    x = device.put(numpy.zeros((adj.n_cols, 8), 'f'), shift=4)
    with pytest.raises(KernelError, match='misaligned address'):
        gpu.bspmm(adj, x, None, None, False)


def test_shuffle_with_lanes_that_have_returned_is_noticed(make_device):
    with pytest.raises(KernelError, match='deadlock'):
        sampled(make_device(replace=('(group, sum[n]', '(~0u, sum[n]')))


@pytest.mark.parametrize(
    'calculate',
    [
        product,
        pipelined,
        sampled,
        sampled_coo,
        maximum,
        long_segments,
        broadcast,
        transposed,
        sliced,
        sliced_vector,
        vector,
    ],
)
def test_kernels_have_no_races(make_device, calculate):
    result, expected = calculate(make_device(RACES))
    numpy.testing.assert_array_equal(result, expected.astype('f'))


@pytest.mark.parametrize(
    'calculate, old, new',
    [
        (product, 'tile * blockDim.x * COLUMNS + threadIdx.x', '0'),
        (sliced, '+ thread % 32;', ';'),
        (long_segments, '__syncthreads();  // the last', '// the last'),
        (
            maximum,
            """            __syncthreads();
            // A lane""",
            '            // A lane',
        ),
        (transposed, 'warp * n_cols;', '0;'),
        (
            transposed,
            """    __syncthreads();

    int *const mine""",
            '    int *const mine',
        ),
        (
            transposed,
            """    __syncthreads();

    int base""",
            '    int base',
        ),
        (
            transposed,
            """        __syncthreads();
        int place""",
            '        int place',
        ),
        (
            transposed,
            """        __syncthreads();
    }
    if (graph""",
            """    }
    if (graph""",
        ),
        # The array that is updated in place is one array here too.
        (sliced_vector, 'residual[at]', 'residual[0]'),
    ],
)
def test_two_users_of_one_place_are_noticed(make_device, calculate, old, new):
    device = make_device(RACES, (old, new))
    with pytest.raises(KernelError, match='data race'):
        for _ in range(20):  # a run shows a race only where two threads come close in time
            calculate(device)
