"""Kernels broken on purpose: each kind of check must find its faults."""

import numpy
import pytest

from tests.emulation import representatives
from tests.emulation.emulator.cuda_on_cpu import MEMORY, RACES, KernelError

# The only condition there that guards a load.
PADDED_GATHER = """if (from[u] >= 0 && c + t < n_vectors)
                        gathered"""

# What comes before the sums of gated_step forward; the gradient's has another word after it.
SUMS_TAKE_THE_PLACE = """    __syncthreads();  // the sums take the weights' place
#pragma unroll
    for (int j = 0; j < PER; ++j)
#pragma unroll
        for (int """

# representative, text of the kernel, what stands there instead: noticed without a sanitizer, by the
# result or by the engine.
PLAIN_FAULTS = [
    ('product', 'indices[at]', 'indices[k]'),
    ('product', 'left > 0; k += AHEAD', 'left > 1; k += AHEAD'),
    ('product', 'c >= n_vectors)', 'c + 1 >= n_vectors)'),
    ('product', 'row >= n_rows', 'row > n_rows'),
    ('product', 'x[(OFFSET)entries', 'x[1 + (OFFSET)entries'),
    ('product', 'tile * blockDim.x * COLUMNS + threadIdx.x', '0'),
    ('pipelined', 'entries = next;', ''),
    ('pipelined', 'next_left = later_end - later_k;', 'next_left = 0;'),
    ('pipelined', 'row >= stop', 'row + step >= stop'),
    ('pipelined', 'after : n_rows;', 'after : n_rows + 1;'),
    ('sampled', 'step = LANES / 2', 'step = LANES / 4'),
    ('sampled', 'c = threadIdx.x;', 'c = 0;'),
    ('sampled', 'n < end - k ? indices[k + n]', 'true ? indices[k + n]'),
    ('sampled', '(group, sum[n]', '(~0u, sum[n]'),
    ('sampled_coo', 'step = LANES / 2', 'step = LANES / 4'),
    ('sampled_coo', 'c = threadIdx.x;', 'c = 0;'),
    ('sampled_coo', 'ids[2 * k + 1]', 'ids[2 * k]'),
    ('modulated', 'index % n_relations : relation', 'relation : relation'),
    ('modulated', 'const int at = u < end - k ? k + u : end - 1;', 'const int at = k;'),
    ('modulated', 'end - k > AHEAD ? k + AHEAD : end', 'end'),
    ('modulated', '(z <= 0 ? 0 : z)', 'z'),
    ('modulated', 'beta[u] = both[n_vectors];', 'beta[u] = both[0];'),
    ('modulated', 'takes[u] = u < end - k', 'takes[u] = true'),
    ('modulated', 'unit * n_vectors * (', 'unit * (n_vectors + 1) * ('),
    ('modulated_gradients', '&& (RESULT != BY_FILM || index % n_relations == relation)', ''),
    ('modulated_gradients', '} else if (z > 0) {', '} else {'),
    ('modulated_gradients', 'RESULT == BY_MESSAGES ? unit : index', 'index'),
    ('modulated_gradients', 'if (RESULT == BY_FILM) to[n_vectors] = result_of_beta;', ''),
    ('modulated_gradients', '(RESULT == BY_FILM ? x : slope)', 'slope'),
    ('modulated_gradients', 'value[u] = widen(data[at]);', ''),
    ('normalised', 'step = LANES / 2', 'step = LANES / 4'),
    ('normalised', 'squares) / n + eps', 'squares) / n'),
    ('normalised', 'row >= n_rows', 'row > n_rows'),
    ('normalised_gradients', 'inv_std * (g - sum', 'inv_std * (g'),
    ('normalised_gradients', '- x_hat * product', ''),
    ('normalised_gradients', 'terms_of_gamma[n_vectors + c]', 'terms_of_gamma[n_vectors]'),
    ('normalised_gradients', '(group, sum, step', '(~0u, sum, step'),
    ('layer', 'used[term];', 'used[0];'),
    ('layer', 'has_any(used, block / (GQ * PQ))', 'has_any(used, 0)'),
    ('summed_softmax', 'for (int term = 0;', 'for (int term = 1;'),
    ('summed_softmax', 'if (other > largest) largest = other;', ''),
    ('summed_softmax', 'sum += __shfl_xor_sync(group, sum, step, LANES);', ''),
    ('summed_softmax', 'if (term) total =', 'total ='),
    ('summed_softmax', '(long long)term * n_rows + row', '(long long)term + row'),
    ('summed_softmax', 'row >= n_rows', 'row > n_rows'),
    ('row_softmax_gradient', '(widen(by.element[e]) - product)', 'widen(by.element[e])'),
    ('row_softmax_gradient', 'y[first + c] = result;', 'y[row * n_vectors + c] = result;'),
    ('rows_of_degrees', 'r <= own.relation ? begin : end', 'r < own.relation ? begin : end'),
    ('rows_of_degrees', 'degree <= RELATIONS}', 'true}'),
    ('rows_of_degrees', 'at = place[r]++;', 'at = place[r];'),
    ('rows_of_degrees', 'next += count;', 'next += 1;'),
    ('rows_of_degrees', 'own.counts ? (WEIGHTED', 'true ? (WEIGHTED'),
    ('rows_of_degrees', 'node.counts ? (WEIGHTED', 'true ? (WEIGHTED'),
    ('rows_of_degrees', 't_indices[k] = 0;', ''),
    ('rows_of_degrees', 'Real sum = WEIGHTED ? 0 : end - begin;', 'Real sum = 0;'),
    ('recurrent', 'argument = total(from, BETWEEN)', 'argument = from[0]'),
    ('recurrent', 'product = keep * to[STATE_AT + o]', 'product = keep'),
    ('recurrent', '(k < XM ? k : k + STATE_AT - XM)', 'k'),
    ('recurrent', 'XM < 2 * OUT ? 2 * OUT : XM', 'XM'),
    ('recurrent', 'to[0] = by_h;', ''),
    ('recurrent', 'to[G] += by_product * keep;', ''),
    ('recurrent', 'upstream - upstream * gate', 'upstream'),
    ('recurrent', 'value + by_s[k - XM]', 'value'),
    ('recurrent', 'o < WIDTH_H && (map || !place.is_state)', 'o < WIDTH_H'),
    ('recurrent', 'narrow(g_all[2 * size + at], by_r);', ''),
    ('recurrent', 'parts[part * stride]', 'parts[0]'),
    (
        'recurrent',
        SUMS_TAKE_THE_PLACE + 'map',
        SUMS_TAKE_THE_PLACE[SUMS_TAKE_THE_PLACE.index('#pragma') :] + 'map',
    ),
    ('recurrent', '    if (!STATE) return;\n    __syncthreads();', '    if (!STATE) return;'),
    ('gated_rows', 'narrow(y[at], gate * value);', 'narrow(y[at], value);'),
    ('gated_rows', 'upstream * gate * value * (1 - gate)', 'upstream * gate * (1 - gate)'),
    ('gated_rows', 'k < X ? WIDTH_X - k', 'k < X ? X - k'),
    ('gated_rows', 'if (k >= WIDTH_X) continue;', ''),
    ('weights_of_gates', 'end - row < CHUNK ? end - row : CHUNK', 'CHUNK - 4'),
    ('weights_of_gates', 'map ? s : reset', 's'),
    ('weights_of_gates', 'half = 1 - half;', ''),
    ('weights_of_gates', 'bias[o] += factor;', ''),
    ('weights_of_gates', 'turn ? element + sum[o][k] : sum[o][k]', 'sum[o][k]'),
    ('weights_of_gates', '        __syncthreads();\n        if (group', '        if (group'),
    ('weights_of_gates', 'if (o < WIDTH_H && k < width)', 'if (k < width)'),
    ('maximum', '|| value != value', ''),
    ('maximum', 'if (u == 0 && i == lane)', 'if (false)'),
    ('maximum', 'lane + step < count', 'true'),
    ('maximum', 'y[to * n_vectors', 'y[(to + 1) * n_vectors'),
    ('maximum', 'at(i + u * lanes);', 'at(i + u * lanes + 12);'),
    ('maximum', '            __syncthreads();\n            // A lane', '            // A lane'),
    ('long_segments', 'i == 0 && begin > first ? n_chunks : 0', '0'),
    ('long_segments', 'side ? stop - 1 : first)', 'first)'),
    ('long_segments', '(end < stop ? end : stop) - begin', 'stop - begin'),
    ('long_segments', 'if (begin < first) begin = first;', ''),
    ('long_segments', '(end - 1) / chunk', 'end / chunk - 1'),
    ('long_segments', 'offsets[middle + 1] <= row', 'offsets[middle + 1] < row'),
    ('long_segments', '__syncthreads();  // the last', '// the last'),
    ('weighted_sum', 'row.weight * value', 'value'),
    ('weighted_sum', 'row.weight * value', 'row.weight * row.weight * value'),
    ('weighted_sum', 'row.weight != 0 ? row.weight', 'true ? row.weight'),
    ('weighted_sum', 'weights[row]', 'weights[begin]'),
    ('weighted_maximum', 'row.weight != 0 ? value', 'true ? value'),
    ('weighted_maximum', 'row.weight != 0 ? value', 'row.weight != 0 ? row.weight * value'),
    ('weighted_maximum', 'value : -infinity()', 'value : 0'),
    ('weighted_maximum', 'count && total.element[0] == -infinity()', 'false'),
    ('weighted_maximum', 'count && weights[begin + count - 1] == 0', 'count'),
    ('broadcast', 'i += blockDim.y', 'i += 2 * blockDim.y'),
    ('broadcast', 'i < end;', 'i <= end;'),
    ('broadcast', 'if (segment < n_segments) value', 'value'),
    ('weighted_broadcast', 'weight != 0 ? weight', 'true ? weight'),
    ('weighted_broadcast', 'weight * widen', 'widen'),
    ('weighted_broadcast', 'scaled(value, weights[i])', 'scaled(value, weights[begin])'),
    ('long_broadcast', 'end - begin <= chunk', 'true'),
    ('long_broadcast', 'part ? stop - 1 : first', 'first'),
    ('long_broadcast', 'end = end < stop ? end : stop;', ''),
    ('long_broadcast', 'begin = begin > first ? begin : first;', ''),
    ('rows_of_relations', 'n_relations : n_relations;', 'n_relations : 0;'),
    ('rows_of_relations', 'v < u ? relation[v] <= relation[u] :', ''),
    ('rows_of_relations', 'relation[u] < r;', 'relation[u] <= r;'),
    ('rows_of_relations', 'out_data[place] = data[k];', 'out_data[place] = data[place];'),
    ('rows_of_relations', 'put(place++, k, column / n_relations)', 'put(place++, k, column)'),
    ('rows_of_relations', 'g < n_offsets;', 'g < n_offsets - 1;'),
    ('rows_of_scaled_relations', 'Real(end - begin)', 'Real(1)'),
    ('rows_of_scaled_relations', 'indptr[column + 1] - indptr[column]', 'end - begin'),
    ('summed_by_type', 'ids[begin + base + thread]', 'ids[begin + thread]'),
    ('summed_by_type', 'thread < here ? ids', 'thread < here - 1 ? ids'),
    ('summed_by_type', '(base + row) * n_channels', 'row * n_channels'),
    ('summed_by_type', 'own < unsigned(n_types) &&', ''),
    ('summed_by_type', '&& !(added >> word & 1)', ''),
    ('summed_by_type', 'taken >> u & 1 ? x', 'true ? x'),
    ('summed_by_type', 'if (base == 0 && is_inside) {', 'if (false) {'),
    ('summed_by_type', 'if (base == 0 && is_inside) {', 'if (base == 0) {'),
    ('summed_by_type', 'if (is_inside) *sum', '*sum'),
    ('summed_by_type', 'before + ((', '(('),
    ('cross_entropy', 'double(t != -1) *', ''),
    ('cross_entropy', '(t - is_positive)', 't'),
    ('cross_entropy', 'size - begin < CHUNK ? size : begin + CHUNK', 'begin + CHUNK'),
    ('cross_entropy', 'lane < blockDim.x / 32 ? sums[lane] : 0', 'sums[lane]'),
    ('cross_entropy', 'step = 16;', 'step = 8;'),
    ('cross_entropy', '    __syncthreads();\n    if (warp)', '    if (warp)'),
    ('cross_entropy', 'partial[2 * i + 1];', 'partial[2 * i];'),
    ('cross_entropy', 'counted += label != -1;', 'counted += 1;'),
    ('cross_entropy_gradient', 'Real(t != -1) *', ''),
    ('cross_entropy_gradient', 'x < 0 ? small : 1', '1'),
    ('cross_entropy_gradient', 'widen(*gy) *', ''),
    ('absolute_error', 'IGNORE_NAN && result', 'false && result'),
    ('absolute_error', 'd < 0 ? -d : d;', 'd;'),
    ('squared_error_gradient', '2 * d :', 'd :'),
    ('squared_error_gradient', 'COUNTED ? *count : divisor', '1'),
    ('transposed', 'mine[column] + before', 'mine[column]'),
    ('transposed', 'i <= n_all_cols', 'i < n_all_cols'),
    ('transposed', 'place += warp_total[w]', 'place += 0'),
    ('transposed', 'if (lane >= step) sum', 'sum'),
    ('transposed', 'warp * n_cols;', '0;'),
    ('transposed', '    __syncthreads();\n\n    int *const mine', '    int *const mine'),
    ('transposed', '    __syncthreads();\n\n    int base', '    int base'),
    ('transposed', '        __syncthreads();\n        int place', '        int place'),
    ('transposed', '+ before;\n        __syncwarp();', '+ before;'),
    ('sliced', 'row_order ? row_order[first_row + place]', 'row_order ? first_row + place'),
    ('sliced', 'warp % warps * 32', '0'),
    ('sliced', 'for (int c = blockIdx.y * TILE; c', 'for (int c = blockIdx.y * TILE; c + 1'),
    ('sliced', 'place >= height', 'false'),
    ('sliced', '+ thread % 32;', ';'),
    ('sliced_by_two_blocks', 'c += gridDim.y * TILE', 'c += TILE'),
    ('sliced_by_two_blocks', 'c = blockIdx.y * TILE', 'c = 0'),
    ('sliced_vector', 'sum[t][e] *= alpha', ''),
    ('sliced_vector', 'if (beta != 0)', 'if (false)'),
    ('sliced_vector', 'AHEAD * height', 'AHEAD'),
    ('sliced_vector', 'residual[at]', 'residual[0]'),
    ('vector', 'sum *= alpha', ''),
    ('vector', 'if (beta != 0)', 'if (false)'),
    ('vector', 'k += AHEAD * LANES', 'k += LANES'),
    ('vector', 'row >= n_rows', 'row > n_rows'),
    ('swa', 'Real result = sum[j]', 'Real result = sum[columns - 1 - j]'),
    ('swa_full', 'sum[j] = 0', 'sum[j + 1] = 0'),
    ('swa_full', 'Real result = sum[j]', 'Real result = sum[j + 1]'),
    ('swa_full', 'row >= row_offsets[graph + 1]', 'row > row_offsets[graph + 1]'),
    ('swa_full', 'k < end', 'k <= end'),
    ('swa_full', 'widen(from[j])', 'widen(from[j + 1])'),
    ('swa_blocked', ' sum[j] = 0;', ' ;'),
    ('swa_blocked', 'number % max_rows', '0'),
    ('swa_blocked', 'blockIdx.y * width', '0'),
    ('swa_blocked', '* n_channels + first;\n        for', '* n_channels;\n        for'),
    ('swa_blocked', 'if (residual)', 'if (false)'),
    (
        'swa_blocked',
        'j = lane; j < columns; j += SUBWARP) sum[j] +=',
        'j = lane; j < columns; j += 2 * SUBWARP) sum[j] +=',
    ),
    (
        'swa_full',
        'for (unsigned j = lane; j < columns; j += SUBWARP) sum[j] = 0;',
        'for (unsigned j = lane; j < columns; j += SUBWARP) sum[columns - 1 - j] = 0;',
    ),
    ('st_blocked', 'total[i] = 0;\n    __syncthreads();', 'total[i] = 0;'),
    ('st_blocked', '    }\n    __syncthreads();\n\n    for (int row', '    }\n\n    for (int row'),
    ('st_shared_wide', 'total[i] = 0', ''),
    ('st_blocked_wide', '+ first + c]));', '+ c]));'),
    ('st_shared_wide', 'k += n_groups', 'k += blockDim.x'),
    ('st_global_wide', 'c += SUBWARP', 'c += 2 * SUBWARP'),
    ('st_blocked', 'row < n_rows;', 'row <= n_rows;'),
    (
        'gathered',
        'before_graph[warp] = before;\n        __syncwarp();',
        'before_graph[warp] = before;',
    ),
    ('gathered', 'column_0 + row * n_relations', 'column_0 + row'),
    ('gathered', 'h = first + lane; h < g', 'h = first + lane; h <= g'),
    ('gathered', 'int(blockDim.x) < first)', 'int(blockDim.x) <= first)'),
    ('gathered_folded', 'starts[molecule]) + FOLDED', 'starts[molecule])'),
    ('gathered_folded', 'missing > 0 ? missing : 0', 'missing'),
    ('gathered_folded', 'out_indptr[last] = entry + sizes.entries', 'out_indptr[last] = entry'),
    (
        'gathered_folded',
        'clear(out_atoms + (long long)last',
        '// clear(out_atoms + (long long)last',
    ),
    (
        'gathered_folded',
        'i < n_rows; i += n_threads) out_weights',
        'i + 1 < n_rows; i += n_threads) out_weights',
    ),
    ('updated', '    __syncthreads();\n    double sum', '    double sum'),
    ('updated', 'if (i >= size) break;', 'if (i > size) break;'),
    ('softmax', 'i += n_units', 'i += 2 * n_units'),
    ('softmax', 'offsets[n_segments] + segment', 'offsets[n_segments] + 1 + segment'),
    ('weighted_softmax', 'weight != 0 && x > largest[e]', 'x > largest[e]'),
    ('weighted_softmax', 'if (weight != 0) total[e] +=', 'total[e] +='),
    ('weighted_softmax', 'weight * exp(', 'exp('),
    (
        'weighted_softmax',
        'if (weight != 0)\n                    narrow(result.element[e], exp',
        'narrow(result.element[e], exp',
    ),
    ('weighted_softmax_gradient', 'weight * total[e]', 'total[e]'),
    ('weighted_softmax_gradient', 'if (weight != 0)\n                    total', 'total'),
    ('softmax_gradient', 'weight * total[e])', 'weight * total[0])'),
    (
        'softmax_gradient',
        'i < end; ++i) {\n            const Vector value = a[i * n_vectors + c], by',
        'i + 1 < end; ++i) {\n            const Vector value = a[i * n_vectors + c], by',
    ),
]

# By AddressSanitizer: reads that change no result.
MEMORY_FAULTS = [
    ('product', '(left - 1 < u ? left - 1 : u)', 'u'),
    ('pipelined', 'row + 2 * step < stop', 'true'),
    ('sampled_coo', 'k >= entry_offsets', 'k > entry_offsets'),
    ('modulated', 'unit >= n_units', 'unit > n_units'),
    ('modulated', 'u < end - k ? k + u : end - 1', 'k + u'),
    ('recurrent', 'at < n_rows ? place.left : 0', 'place.left'),
    ('weights_of_gates', 'row + j < end && first + c < width', 'first + c < width'),
    ('maximum', 'to < n_segments', 'to <= n_segments'),
    ('transposed', 'entry < end ? indices', 'true ? indices'),
    ('transposed', 'shared + n_entries;', 'shared + n_entries + 1;'),
    ('sliced_vector', 'slice >= n_slices', 'slice > n_slices'),
    ('sliced_vector', 'at < end ? column[at]', 'true ? column[at]'),
    ('sliced_vector', PADDED_GATHER, PADDED_GATHER.replace('from[u] >= 0', 'true')),
    ('vector', 'at < end ? indices[at]', 'true ? indices[at]'),
    ('swa_full', 'graph >= n_graphs', 'graph > n_graphs'),
    ('st_shared', 'i < n_rows * width', 'i <= n_rows * width'),
    ('st_global', 'k >= entry_offsets[n_graphs]', 'k > entry_offsets[n_graphs]'),
    ('updated', '            if (i < size) {', '            if (i <= size) {'),
    ('softmax', 'segment < n_segments', 'segment <= n_segments'),
    ('summed_by_type', 'row < here ? widen', 'true ? widen'),
    ('summed_by_type', '(is_inside ? channel : n_channels - 1)', 'channel'),
    ('cross_entropy_gradient', 'if (i < size)', ''),
]

# By ThreadSanitizer alone: neither order of the threads changes the result.
RACES_FAULTS = [
    ('summed_by_type', 'own % WARPS == warp &&', ''),
    ('transposed', '        __syncthreads();\n    }\n    if (graph', '    }\n    if (graph'),
    ('transposed', '__popc(peers);\n        __syncwarp();', '__popc(peers);'),
    ('swa', 'sum = output + sub_warp * width', 'sum = output + sub_warp * (width - 1)'),
    ('st_blocked', 'atomicAdd(&total[row * width + c], ', 'total[row * width + c] += ('),
    ('st_global', 'atomicAdd(&y[row * n_channels + c], ', 'y[row * n_channels + c] += ('),
    ('gathered', '__syncthreads();\n    Sizes before', 'Sizes before'),
    (
        'gathered',
        '__syncwarp();  // before lane 0 writes the next',
        '// before lane 0 writes the next',
    ),
    ('updated', '    __syncthreads();  // of_warp may still', '    // of_warp may still'),
]


def calculated(make_device, sanitizer, name, old, new):
    return getattr(representatives, name)(make_device(sanitizer, (old, new)))


@pytest.mark.parametrize('name, old, new', PLAIN_FAULTS)
def test_noticed_without_a_sanitizer(make_device, name, old, new):
    try:
        result, expected = calculated(make_device, None, name, old, new)
    except KernelError:
        return
    assert not numpy.array_equal(result, expected.astype(result.dtype), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize('name, old, new', MEMORY_FAULTS)
def test_noticed_by_address_sanitizer(make_device, name, old, new):
    with pytest.raises(KernelError, match='AddressSanitizer'):
        calculated(make_device, MEMORY, name, old, new)


@pytest.mark.slow
@pytest.mark.parametrize('name, old, new', RACES_FAULTS)
def test_noticed_by_thread_sanitizer(make_device, name, old, new):
    with pytest.raises(KernelError, match='data race'):
        for _ in range(20):  # a run shows a race only where two threads come close in time
            calculated(make_device, RACES, name, old, new)
