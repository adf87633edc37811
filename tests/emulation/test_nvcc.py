"""The kernels as NVIDIA's compiler sees them, for every architecture; no GPU is needed for that."""

import functools
import os
import re
import shutil
import subprocess

import numpy
import pytest

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda import partial_sums
from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.ops.bspmm import AHEAD_LONG
from chainer_bspmm.ops.bspmm import sum_pieces_launch
from chainer_bspmm.ops.embed_rows import embed_launch
from chainer_bspmm.ops.gates.launches import gated_launch
from chainer_bspmm.ops.gates.launches import gated_weights_launch
from chainer_bspmm.ops.graph_linear.launches import Layer
from chainer_bspmm.ops.graph_linear.launches import layer_launch
from chainer_bspmm.ops.mean_loss import LOSS_CHUNK
from chainer_bspmm.training import flat_gradients
from chainer_bspmm.training import fused_update
from chainer_bspmm.training import peer_memory
from chainer_bspmm.training import reports
from tests.emulation.emulator import cache


# From Turing on: the generations that CuPy supports and this project names.
ARCHITECTURES = ('sm_75', 'sm_80', 'sm_90', 'sm_100', 'sm_120')
# The widest and the narrowest vector of every storage dtype. The other constants take turns (MAX
# is listed twice, otherwise it would only be compiled with narrow vectors).
STORAGE = [('e', 8), ('e', 1), ('f', 4), ('f', 1), ('d', 2), ('d', 1)]
# They add one element at a time, and have no atomics on half.
WITH_ATOMICS = ('bspmm_st_shared', 'bspmm_st_global')
NARROW = (*WITH_ATOMICS, 'embed_grad', 'mean_loss', 'flat_gradients')
WIDEST = {**dict.fromkeys(NARROW, 1), 'dropout': 4, 'gated_step': 4, 'gated_weights': 4}
ST_CONSTANTS = [
    (('SUBWARP', subwarp), ('WEIGHTS', weights), ('TRANS', trans))
    for subwarp, weights, trans in ((1, 0, 0), (32, 1, 1), (4, 1, 0), (32, 0, 1))
]
DOTS = [
    (('LANES', lanes), ('TILE', tile))
    for lanes, tile in ((1, 1), (2, 4), (4, 4), (8, 2), (16, 2), (32, 4))
]
H200 = Device(132, 60 << 20)


def gated_step(n_rows, widths, has_state, is_gradient, itemsize, is_same=False):
    """Return the constants of what the policy launches, without the vector's width."""
    plan = gated_launch(n_rows, widths, has_state, is_same, is_gradient, 1, itemsize, H200)
    return (*plan.defines[1:], ('TANH', int(has_state)))


def gated_weights(widths, has_state, itemsize, is_same=False):
    plan = gated_weights_launch(2300, widths, has_state, is_same, 1, itemsize, H200)
    return plan.defines[1:]


# For each of STORAGE what needs most registers, or has widths that are not whole quads.
GATED = [
    gated_step(2300, (64, 64, 64), True, False, 4),
    gated_step(2300, (33, 5, 7), False, True, 4),
    gated_step(18400, (128, 128, 128), True, True, 4, is_same=True),
    gated_step(600, (65, 1, 65), True, False, 4, is_same=True),
    gated_step(18400, (64, 64, 64), True, True, 8),
    gated_step(2300, (64, 0, 33), False, False, 8),
]
GATED_WEIGHTS = [
    gated_weights(*given)
    for given in (
        ((64, 64, 64), True, 4),
        ((33, 5, 7), False, 4),
        ((64, 64, 64), True, 4, True),
        ((16, 0, 33), False, 4),
        ((64, 64, 64), True, 8),
        ((3, 5, 7), True, 8),
    )
]


def graph_linear(n_rows, is_backward, itemsize, has_quads, *layer):
    layer = Layer(*layer)
    plan = layer_launch(layer, n_rows, itemsize, has_quads, H200, is_backward)
    has_dropout = int(layer.activation == 'relu')
    return (*plan.defines[1:], ('WEIGHTED', 1), ('DROPOUT', has_dropout), ('FEATURES', 1))


# As many matrices as a thread may hold gradients of, with half and with all of the threads.
LAYERS = [
    graph_linear(2300, True, 2, True, 64, 64, 6, False, False, False, 6, True, 'sigmoid'),
    graph_linear(18400, True, 2, False, 63, 61, 6, False, False, True, 0, False, 'relu'),
    graph_linear(18400, True, 4, True, 64, 64, 4, True, False, True, 1, False, 'tanh'),
    graph_linear(18400, True, 4, False, 64, 62, 7, False, False, False, 7, True, 'sigmoid'),
    graph_linear(18400, False, 8, True, 64, 64, 4, True, False, True, 1, False, 'tanh'),
    graph_linear(18400, True, 8, True, 64, 96, 1, False, True, True, 1, False, 'relu'),
]
CONSTANTS = {
    'bspmm_csr': [
        (
            ('WEIGHTS', weights),
            ('RESIDUAL', residual),
            ('AHEAD', ahead),
            ('COLUMNS', columns),
            ('PIPELINED', pipelined),
            ('STREAM', stream),
            ('OFFSET', offset),
        )
        # The most that the policy gives to each.
        for weights, residual, ahead, columns, pipelined, stream, offset in (
            (1, 1, 3, 2, 1, 1, 'unsigned'),
            (0, 0, 5, 1, 0, 0, 'unsigned'),
            (2, 1, 3, 2, 1, 1, 'size_t'),
            (1, 0, 3, 4, 0, 1, 'unsigned'),
            (1, 1, 3, 2, 1, 0, 'size_t'),
            (2, 0, 5, 1, 1, 0, 'unsigned'),
        )
    ],
    # From dtype to dtype, so that every one meets three of them.
    'bspmm_swa': [
        (('SUBWARP', lanes), ('WEIGHTS', weights))
        for lanes, weights in ((1, 0), (2, 1), (4, 2), (8, 0), (16, 1), (32, 2))
    ],
    'bsddmm_csr': DOTS,
    'edge_film': [
        (('RESULT', result), ('WEIGHTED', weighted))
        for result, weighted in (
            ('BY_FILM', 1),
            ('OUTPUT', 0),
            ('BY_MESSAGES', 1),
            ('BY_FILM', 0),
            ('OUTPUT', 1),
            ('BY_MESSAGES', 0),
        )
    ],
    'graph_linear': LAYERS,
    'embed_grad': [embed_launch(2300, 118, 64).defines[1:]],
    'mean_loss': [
        (
            ('KIND', kind),
            ('IGNORE_NAN', ignore_nan),
            ('COUNTED', counted),
            ('GRADIENT', gradient),
            ('COMBINE', combine),
            ('ALONG', along),
            ('CHUNK', LOSS_CHUNK),
        )
        for kind, ignore_nan, counted, gradient, combine, along in (
            ('SIGMOID_CROSS_ENTROPY', 0, 1, 0, 0, 1),
            ('SQUARED_ERROR', 0, 0, 0, 0, 1),
            ('SIGMOID_CROSS_ENTROPY', 0, 1, 0, 0, 1),
            ('ABSOLUTE_ERROR', 1, 0, 1, 0, 0),
            ('SIGMOID_CROSS_ENTROPY', 0, 1, 1, 0, 0),
            ('BINARY_ACCURACY', 0, 1, 0, 1, 0),
        )
    ],
    'sum_pieces': [sum_pieces_launch(2, 64, 64).defines[1:]],
    'sum_partials': [partial_sums.DEFINES[1:]] * len(STORAGE),
    'gated_step': GATED,
    'gated_weights': GATED_WEIGHTS,
    'layer_norm': [
        (('LANES', lanes), ('GRADIENT', gradient))
        for lanes, gradient in ((32, 1), (1, 0), (8, 1), (4, 0), (16, 0), (32, 1))
    ],
    'segment_reduce': [
        (('AHEAD', ahead), ('OPERATION', name), ('COMBINE', combine), ('WEIGHTED', weighted))
        for ahead, name, combine, weighted in (
            (8, 'SUM', 1, 0),
            (4, 'MAX', 0, 1),
            (8, 'MAX', 0, 1),
            (4, 'SUM', 1, 1),
            (8, 'MAX', 1, 1),
            (8, 'SUM', 0, 0),
        )
    ],
    'segment_broadcast': [(('WEIGHTED', weighted),) for weighted in (1, 0, 1, 0, 0, 1)],
    'segment_softmax': [
        (('GRADIENT', gradient), ('WEIGHTED', weighted))
        for gradient, weighted in ((1, 1), (0, 0), (0, 1), (1, 0), (0, 0), (1, 1))
    ],
    'dropout': [
        (('KIND', kind),) for kind in ('DROPOUT', 'RELU', 'RELU', 'DROPOUT', 'MASK', 'DROPOUT')
    ],
    'bsddmm_coo': DOTS,
    'transpose_csr': [()],
    'relation_rows': [(('VALUES', values),) for values in ('RECIPROCALS', 'NONE', 'GIVEN')],
    'degree_rows': [
        (('RELATIONS', relations), ('WEIGHTED', weighted))
        for relations, weighted in ((7, 1), (1, 0), (7, 0), (7, 1), (16, 1), (3, 0))
    ],
    'row_softmax': [
        (('LANES', lanes), ('GRADIENT', gradient))
        for lanes, gradient in ((32, 0), (1, 1), (16, 0), (4, 1), (16, 1), (32, 0))
    ],
    'gather_batch': [
        (('LABELS_ONLY', labels), ('FOLDED', folded)) for labels, folded in ((0, 0), (1, 0), (0, 1))
    ],
    'report': [reports.DEFINES[1:]],
    'flat_gradients': [
        flat_gradients.defines(is_pack, numpy.dtype(flat), numpy.dtype(loss), n_peers)[1:]
        for is_pack, flat, loss, n_peers in (
            (True, 'f', 'f', 0),
            (False, 'f', 'f', 0),
            (True, 'e', 'd', 0),
            (False, 'd', 'f', 0),
            (True, 'd', 'e', 8),
            (True, 'e', 'd', 2),
            (True, 'f', 'f', 8),
        )
    ],
    'peer_sum': [peer_memory.defines(n)[1:] for n in (2, 8)],
    'staged_copy': [()],
    'bspmm_st_shared': ST_CONSTANTS,
    'bspmm_st_global': ST_CONSTANTS,
    # As many columns of x a thread as the policy gives it.
    'bspmm_sell': [
        (('TILE', tile), ('WEIGHTS', weights), ('WHOLE_WARPS', whole))
        for tile, weights, whole in (
            (1, 1, 1),
            (8, 1, 0),
            (2, 0, 1),
            (8, 1, 1),
            (4, 1, 0),
            (8, 0, 0),
        )
    ],
    'spmv_csr': [
        (('LANES', lanes), ('WEIGHTS', weights))
        for lanes, weights in ((1, 1), (2, 0), (4, 1), (8, 1), (16, 0), (32, 1))
    ],
}
# Everything for sm_90; for each of the others a third of it, in turn. `make test` compiles
# each kernel that is close to a spill once; the others g++ has compiled, for the rest of the tests.
MOST_REGISTERS = (
    *('bspmm_csr', 'bsddmm_csr', 'edge_film', 'gated_step', 'gated_weights', 'graph_linear'),
    *('segment_reduce', 'segment_softmax'),
)
VARIANTS = [
    (architecture, dtype, width)
    for turn, architecture in enumerate(ARCHITECTURES)
    for i, (dtype, width) in enumerate(STORAGE)
    if architecture == 'sm_90' or i % 3 == turn % 3
]


def defines_of(name, dtype, width):
    constants = CONSTANTS[name]
    turn = STORAGE.index((dtype, width)) % len(constants)
    return (('VECTOR', min(width, WIDEST.get(name, width))), *constants[turn])


@functools.lru_cache(maxsize=None)
def known_architectures():
    return subprocess.run(
        ['nvcc', '--list-gpu-code'], capture_output=True, text=True, check=True
    ).stdout.split()


def compiled(name, dtype, defines, architecture, *flags):
    """Return what ptxas says of a kernel, or skip where the compiler is not there for it."""
    if shutil.which('nvcc') is None:
        pytest.skip('nvcc is not on the PATH')
    if architecture not in known_architectures():
        pytest.skip('this nvcc does not know %s' % architecture)
    options = (
        *kernels.options(dtype, defines),
        '-arch=' + architecture,
        '-cubin',
        '-Werror=all-warnings',
        '-Xptxas=-v',
        *flags,
    )
    # The file itself: in the text that CuPy compiles, `#pragma once` stands in the main file.
    path = kernels.paths()[name]

    def compile_it():
        done = subprocess.run(
            ['nvcc', *options, '-I%s' % kernels.directory(), '-o', os.devnull, str(path)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return cache.cached_text(compile_it, kernels.source(name), options, cache.version('nvcc'))


def usage(report):
    """Return registers a thread, bytes of static shared memory, bytes of the stack and spilled."""

    def number(pattern):
        return sum(map(int, re.findall(pattern, report)))

    registers = re.search(r'Used (\d+) registers', report)
    assert registers and 'bytes spill stores' in report, 'not a report of ptxas: ' + report
    return (
        int(registers[1]),
        number(r'(\d+) bytes smem'),
        number(r'(\d+) bytes stack frame'),
        number(r'(\d+) bytes spill (?:stores|loads)'),
    )


def slow_but_one(cases, first):
    """Mark as slow all of a list of cases but the one at `first` (None: all)."""
    return [
        case if i == first else pytest.param(*case, marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]


def variants(name):
    cases = [
        (name, *variant) for variant in VARIANTS if name not in WITH_ATOMICS or variant[1] != 'e'
    ]
    quick = cases.index((name, 'sm_90', 'f', 4)) if name in MOST_REGISTERS else None
    return slow_but_one(cases, quick)


def test_every_kernel_is_compiled():
    assert set(kernels.paths()) == {*CONSTANTS, 'fused_update'}


@pytest.mark.parametrize(
    'name, architecture, dtype, width', [case for name in CONSTANTS for case in variants(name)]
)
def test_kernel_compiles_without_a_warning_or_a_spill(nvcc_usage, name, dtype, width, architecture):
    check_compiled(nvcc_usage, name, dtype, defines_of(name, dtype, width), architecture)


@pytest.mark.parametrize(
    'name, architecture, dtype, width',
    [case for name in ('bspmm_csr', 'bsddmm_csr') for case in variants(name)],
)
def test_rows_in_pieces_compile(nvcc_usage, name, dtype, width, architecture):
    defines = dict(defines_of(name, dtype, width), PIECES=1)
    if name == 'bspmm_csr':
        defines.update(AHEAD=AHEAD_LONG, COLUMNS=1, PIPELINED=0)
    check_compiled(nvcc_usage, name, dtype, tuple(defines.items()), architecture)


def check_compiled(nvcc_usage, name, dtype, defines, architecture):
    registers, shared, stack, spilled = usage(compiled(name, dtype, defines, architecture))
    nvcc_usage.append(
        (
            name,
            architecture,
            ' '.join(
                ['STORAGE=' + kernels.STORAGE[dtype], *('%s=%s' % define for define in defines)]
            ),
            registers,
            shared,
        )
    )
    assert (stack, spilled) == (0, 0), 'bytes of the stack and spilled'


RULES = ('NONE', 'SGD', 'MOMENTUM_SGD', 'RMSPROP', 'RMSPROP_EPS_INSIDE', 'ADAM', 'AMSGRAD')


@pytest.mark.parametrize(
    'architecture, dtype, rule',
    slow_but_one(
        [
            (architecture, dtype, rule)
            for turn, architecture in enumerate(ARCHITECTURES)
            for dtype in 'fd'
            for i, rule in enumerate(RULES)
            if architecture == 'sm_90' or i % 3 == turn % 3
        ],
        15,
    ),
)
def test_fused_update_compiles_without_a_warning_or_a_spill(nvcc_usage, architecture, dtype, rule):
    """Nor a copy of its table on the stack."""
    defines = fused_update.defines(numpy.dtype(dtype), rule)
    registers, shared, stack, spilled = usage(
        compiled('fused_update', dtype, defines, architecture)
    )
    nvcc_usage.append(
        (
            'fused_update',
            architecture,
            'STORAGE=%s RULE=%s' % (kernels.STORAGE[dtype], rule),
            registers,
            shared,
        )
    )
    assert (stack, spilled) == (0, 0), 'bytes of the stack and spilled'


def test_spill_is_noticed():
    defines = defines_of('segment_reduce', 'e', 8)
    report = compiled('segment_reduce', 'e', defines, 'sm_90', '-maxrregcount=24')
    assert usage(report)[3] > 0


@pytest.mark.parametrize(
    'name, n_peers', [('flat_gradients', n) for n in (0, 2, 8)] + [('peer_sum', n) for n in (2, 8)]
)
def test_what_peers_write_meanwhile_is_read(tmp_path, name, n_peers):
    """32 bits and the number of the turn at once, and not from a cache of constants."""
    if shutil.which('nvcc') is None:
        pytest.skip('nvcc is not on the PATH')
    f, out = numpy.dtype('f'), tmp_path / 'kernel.ptx'
    defines = peer_memory.defines(n_peers)
    if name == 'flat_gradients':
        defines = flat_gradients.defines(True, f, f, n_peers)
    options = kernels.options('f', defines)
    words = ['nvcc', *options, '-arch=sm_90', '-ptx', '-I%s' % kernels.directory(), '-o', out]
    subprocess.run([*map(str, words), str(kernels.paths()[name])], check=True)
    text = out.read_text()
    for access in ('st.relaxed.sys.global.u64', 'ld.relaxed.sys.global.u64'):
        assert (access in text) == (n_peers > 0)
