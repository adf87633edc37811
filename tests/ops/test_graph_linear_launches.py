"""Layers by kernels/graph_linear.cu, forward and backward, compared with float64."""

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.ops.graph_linear.launches import layer_backward, layer_forward, layer_of
from tests.support import reference
from tests.support.cases import pairs
from tests.support.devices import on_an_emulated_device, slow_unless
from tests.support.layer_kernels import BOUND, by_relation, expected, layer, matrices, side


def on_host(gradients):
    """Return a copy of the dict with arrays, or lists of arrays, on the host."""
    return {name: cuda.to_cpu(found) for name, found in gradients.items()}


def check(gpu, dtype, spec, n_rows, is_weighted=True, ratio=0.0, shift=0):
    rng = numpy.random.RandomState(1)

    def drawn(*shape):
        return rng.uniform(-1, 1, shape).astype(dtype)

    x, gy = drawn(n_rows, spec.width_in), drawn(n_rows, spec.width_out)
    n_all = spec.n_relations * spec.width_out
    W = drawn(n_all, spec.width_in) if spec.n_relations else None
    W_self = drawn(spec.width_out, spec.width_in) if spec.has_self else None
    b = drawn(n_all) if spec.has_relation_bias else None
    b_self = drawn(spec.n_biases * spec.width_out) if spec.n_biases else None
    parameters = W, W_self, b, b_self
    A = matrices(n_rows, max(spec.n_relations, 1), dtype, is_weighted)
    forward = backward = None
    if spec.n_relations:
        forward = side(gpu, A, is_weighted)
        backward = side(gpu, A.transpose(0, 2, 1), is_weighted)

    def put(array):
        return None if array is None else gpu.put(array, shift)

    kept, draw = 1.0, None
    if ratio:
        draw = 2**40 + 3, 5, gpu.put(numpy.array([2**33 + 1], 'u8'))
        kept = reference.kept(gy.size, ratio, 2**40 + 3, 5, 2**33 + 1).reshape(gy.shape)
        kept = kept * float(numpy.dtype(dtype).type(1 / (1 - ratio)))
    names = 'W', 'W_self', 'b', 'b_self'
    given = {name: put(array) for name, array in zip(names, parameters) if array is not None}
    y = layer_forward(spec, forward, put(x), given, ratio, draw)
    arguments = spec, backward, put(x), y, put(gy), given, ratio
    gradients = on_host(layer_backward(*arguments))
    again = on_host(layer_backward(*arguments, has_features=False))
    assert again.pop('x') is None
    more = on_host(layer_backward(*arguments, more=put(x))).pop('x')
    bound = BOUND[dtype] * max(1, abs(gradients['x']).max())
    numpy.testing.assert_allclose(more, gradients['x'] + x, 0, bound, err_msg='more')
    wide = [None if array is None else array.astype('d') for array in parameters]
    wanted, largest = expected(spec, A.astype('d'), x.astype('d'), wide, gy.astype('d'), kept)
    if spec.by_relation:  # one array for each relation, and for each of the equal biases
        wanted['W'] = by_relation(spec, wanted['W'])
        wanted['b_self'] = numpy.tile(wanted['b_self'], (spec.n_biases, 1))
        for found in (gradients, again):
            found.update({name: numpy.stack(found[name]) for name in ('W', 'b_self')})
    for name, array in dict(gradients, y=cuda.to_cpu(y)).items():
        exact = wanted.pop(name)
        assert array.dtype == dtype and array.shape == exact.shape, name
        scale = max(1, largest, abs(exact).max())
        numpy.testing.assert_allclose(array, exact, 0, BOUND[dtype] * scale, err_msg=name)
    assert not wanted
    for name, array in again.items():
        numpy.testing.assert_array_equal(array, gradients[name])


SPECS = {
    'convolution': dict(n_relations=1, activation='relu'),
    'relations': dict(
        n_relations=3, has_self=True, has_relation_bias=True, n_biases=1, activation='tanh'
    ),
    'relations alone': dict(n_relations=2),
    'loop': dict(n_relations=1, loop=True, has_relation_bias=True, n_biases=1),
    'linear': dict(n_biases=1, activation='relu'),
    'degrees': dict(n_relations=4, by_relation=True, n_biases=4, activation='sigmoid'),
    'many relations': dict(n_relations=33, has_self=True, activation='relu'),
}


QUICK = ('relations', 'e'), ('degrees', 'd')


@pytest.mark.parametrize(
    'name, dtype',
    [
        slow_unless(dtype == 'f' or (name, dtype) in QUICK, name, dtype)
        for name in SPECS
        for dtype in 'efd'
    ],
)
def test_layers(gpu, name, dtype):
    check(gpu, dtype, layer(12, 8, **SPECS[name]), 37)
    assert gpu.names == {'graph_linear', 'sum_partials'}


@pytest.mark.parametrize(
    'name, widths',
    [
        *(('relations', widths) for widths in ((1, 5), (7, 1), (65, 4), (64, 64), (4, 300))),
        *(slow_unless(False, 'relations', widths) for widths in ((1, 1), (3, 33))),
        *(
            slow_unless(False, name, widths)
            for name in ('loop', 'linear')
            for widths in ((1, 1), (65, 4), (64, 64))
        ),
    ],
)
def test_widths(gpu, name, widths):
    check(gpu, 'f', layer(*widths, **SPECS[name]), 21)


def test_relations_that_no_row_has_are_not_multiplied(gpu):
    spec = layer(8, 8, n_relations=3, activation='relu')
    n_rows = 20
    A = matrices(n_rows, 3, 'f')
    A[1] = 0
    W = numpy.ones((8, 3, 8), 'f')
    W[:, 1] = numpy.nan
    x = gpu.put(numpy.ones((n_rows, 8), 'f'))
    given = {'W': gpu.put(W.reshape(24, 8))}
    y = layer_forward(spec, side(gpu, A, True), x, given)
    gradients = layer_backward(spec, side(gpu, A.transpose(0, 2, 1), True), x, y, x, given)
    assert y.any() and numpy.isfinite(y).all() and numpy.isfinite(gradients['x']).all()


@pytest.mark.parametrize(
    'n_rows, is_weighted', [(1, True), (15, True), (16, True), (17, True), (33, True), (17, False)]
)
def test_rows(gpu, n_rows, is_weighted):
    check(gpu, 'f', layer(8, 12, **SPECS['relations']), n_rows, is_weighted)


@on_an_emulated_device
@pytest.mark.parametrize('n_sms', [1, 2])
def test_blocks_take_several_tiles(gpu, n_sms):
    gpu.sizes = Device(n_sms, 60 << 20)
    check(gpu, 'f', layer(8, 8, **SPECS['relations']), 150)
    assert {constants.get('ROWS') for constants in gpu.launched} <= {32, 24, None}


@pytest.mark.parametrize('ratio', [0.0, 0.5])
def test_nan_stays_where_it_comes_from(gpu, ratio):
    """NaN reaches exactly the rows with an entry for it, despite a rectifier and dropout."""
    spec = layer(8, 8, **SPECS['convolution'])
    n_rows = 20
    A = matrices(n_rows, 1, 'f')
    x = numpy.ones((n_rows, 8), 'f')
    x[5] = numpy.nan
    given = {'W': gpu.put(numpy.ones((8, 8), 'f'))}
    draw = 3, 1, gpu.put(numpy.array([5], 'u8'))
    y = layer_forward(spec, side(gpu, A, True), gpu.put(x), given, ratio, draw)
    has_nan = A[0, :, 5] != 0
    assert 0 < has_nan.sum() < n_rows
    y = cuda.to_cpu(y)
    numpy.testing.assert_array_equal(numpy.isnan(y), numpy.repeat(has_nan[:, None], 8, axis=1))


@pytest.mark.parametrize(
    'dtype, widths, activation',
    [
        slow_unless(case[0] == 'f', *case)
        for case in pairs('efd', [(8, 8), (8, 7)], ['relu', 'identity'])
    ],
    ids=str,
)
def test_dropout(gpu, dtype, widths, activation):
    spec = layer(*widths, n_relations=1, activation=activation)
    check(gpu, dtype, spec, 19, ratio=0.3)


@pytest.mark.parametrize('dtype, value', [('f', 0), ('e', 2**-20)])  # -(2**-26) is rounded to -0
def test_zeros_that_dropout_keeps_have_gradients(gpu, dtype, value):
    spec = layer(4, 4)
    x = numpy.full((9, 4), value, dtype)
    given = {'W_self': gpu.put(-numpy.eye(4, dtype=dtype) * numpy.dtype(dtype).type(2**-6))}
    draw = 3, 1, gpu.put(numpy.array([5], 'u8'))
    y = layer_forward(spec, None, gpu.put(x), given, 0.5, draw)
    kept = reference.kept(36, 0.5, 3, 1, 5).reshape(9, 4)
    assert 0 < kept.sum() < 36 and not y.any()
    ones = gpu.put(numpy.ones((9, 4), dtype))
    gradients = layer_backward(spec, None, gpu.put(x), y, ones, given, 0.5)
    numpy.testing.assert_array_equal(cuda.to_cpu(gradients['x']), -(2.0**-5) * kept)


@on_an_emulated_device
@pytest.mark.parametrize(
    'widths', [(40, 48), slow_unless(False, (32, 48)), slow_unless(False, (48, 32))]
)
@pytest.mark.parametrize('name', ['relations', 'degrees'])
def test_blocks_share_the_columns_of_a_wide_result(gpu, name, widths):
    gpu.sizes = Device(132, 60 << 20, 40 << 10)
    check(gpu, 'f', layer(*widths, **SPECS[name]), 21)
    assert max(constants.get('SLICES', 0) for constants in gpu.launched) > 1


@on_an_emulated_device
def test_shares_of_columns_drop_the_same_elements(gpu):
    gpu.sizes = Device(132, 60 << 20, 6 << 10)
    check(gpu, 'f', layer(8, 48, **SPECS['convolution']), 19, ratio=0.3)
    assert gpu.launched[0]['SLICES'] > 1


@pytest.mark.parametrize('n_in, n_out', [(3, 0), (0, 3)])
def test_matrices_without_elements_are_no_launch(gpu, n_in, n_out):
    x, W = (gpu.put(numpy.empty(shape, 'f')) for shape in ((4, n_in), (n_out, n_in)))
    assert layer_of(x, {'W_self': W}, 0, loop=False, activation='relu') is None


@pytest.mark.parametrize('shift, quads', [(0, 1), (4, 0), (8, 0)])
def test_rows_are_read_as_quads_if_they_begin_at_16_bytes(gpu, shift, quads):
    check(gpu, 'f', layer(8, 8, **SPECS['relations']), 19, shift=shift)
    assert {constants.get('QUADS') for constants in gpu.launched} == {quads, None}


def test_no_rows(gpu):
    spec = layer(3, 2, n_biases=1)
    x, W = gpu.put(numpy.ones((0, 3), 'f')), gpu.put(numpy.ones((2, 3), 'f'))
    b = gpu.put(numpy.ones(2, 'f'))
    none = gpu.put(numpy.ones((0, 2), 'f'))
    given = {'W_self': W, 'b_self': b}
    assert layer_forward(spec, None, x, given).shape == (0, 2)
    gradients = layer_backward(spec, None, x, none, none, given)
    assert gradients['x'].shape == (0, 3) and not gpu.launched
    assert not gradients['W_self'].any() and gradients['W_self'].shape == (2, 3)
    assert gradients['b_self'].tolist() == [0, 0]
