"""Products by a separate cuBLAS handle: layouts, shapes, dtypes, streams, lifetime, errors.

On the host a stand-in for the library shows that each call requests the right product.
"""

import ctypes
import itertools
import pathlib
import types

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.cuda import gemm, step
from tests.emulation.emulator import cublas_on_cpu
from tests.support import assert_close, DTYPES, poisoned
from tests.support.cases import pairs


class OnHost:
    """Installed stand-in for cuBLAS, with functions that make arrays for it."""

    put = staticmethod(cublas_on_cpu.on_host)
    empty = staticmethod(cublas_on_cpu.empty)

    def __init__(self, monkeypatch):
        self.streams = cublas_on_cpu.install(monkeypatch)


class OnDevice:
    def __init__(self, monkeypatch):
        poisoned(monkeypatch, cuda.cupy)
        self.put = cuda.cupy.asarray
        self.empty = cuda.cupy.empty


@pytest.fixture(params=[OnHost, pytest.param(OnDevice, marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    return request.param(monkeypatch)


@pytest.fixture
def host(monkeypatch):
    return OnHost(monkeypatch)


# name -> function that makes an array (..., rows, columns) that lies in memory like that
LAYOUTS = {
    'rows': lambda empty, lead, m, n: empty(lead + (m, n)),
    'columns': lambda empty, lead, m, n: empty(lead + (n, m)).swapaxes(-1, -2),
    'part of rows': lambda empty, lead, m, n: empty(lead + (m, n + 3))[..., 2 : n + 2],
    'part of columns': lambda empty, lead, m, n: empty(lead + (n, m + 3)).swapaxes(-1, -2)[
        ..., 1 : m + 1, :
    ],
    'every second': lambda empty, lead, m, n: empty(lead + (2 * m, 2 * n))[..., ::2, ::2],
    'backwards': lambda empty, lead, m, n: empty(lead + (m, n))[..., ::-1, :],
}
STACK_LAYOUTS = {
    **LAYOUTS,
    'stack backwards': lambda empty, lead, m, n: empty(lead + (m, n))[::-1],
    'stack in between': lambda empty, lead, m, n: empty((m,) + lead + (n,)).swapaxes(0, 1),
}
IN_PLACE = ('rows', 'columns', 'part of rows', 'part of columns', 'stack in between')


def laid_out(place, array, layout):
    """Return a copy of a NumPy array in this layout, surrounded by NaN."""
    *lead, m, n = array.shape
    target = STACK_LAYOUTS[layout](lambda shape: place.empty(shape, array.dtype), tuple(lead), m, n)
    target[...] = place.put(array)
    return target


def random(*shape, dtype='float32'):
    return numpy.random.RandomState(0).uniform(-1, 1, shape).astype(dtype)


def check(actual, product, a, b, dtype):
    assert_close(actual, product(a.astype('d'), b.astype('d')), dtype)
    assert actual.flags.c_contiguous


SHAPES = (5, 7, 3), (1, 7, 3), (5, 1, 3), (5, 7, 1), (1, 1, 1), (1, 7, 1), (64, 33, 130)


@pytest.mark.parametrize(
    'm, k, n, dtype',
    [
        *((*shape, 'float32') for shape in SHAPES),
        *((5, 7, 3, dtype) for dtype in ('float16', 'float64')),
    ],
)
def test_layouts(place, m, k, n, dtype):
    blas = gemm.Blas()
    a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
    for layouts in itertools.product(LAYOUTS, repeat=2):
        x, y = (laid_out(place, array, layout) for array, layout in zip((a, b), layouts))
        check(blas.dot(x, y), numpy.dot, a, b, dtype)


@pytest.mark.parametrize('layout', STACK_LAYOUTS)
def test_what_is_read_where_it_lies(host, layout):
    array = laid_out(host, random(4, 5, 7), layout)
    assert (gemm._laid_out(array)[0] is array) == (layout in IN_PLACE)
    assert gemm._laid_out(array)[1] == (layout in ('columns', 'part of columns'))


def test_rows_that_lie_askew_are_copied(host):
    records = numpy.zeros(5, numpy.dtype([('byte', 'u1'), ('row', 'f4', 7)]))
    records['row'] = random(5, 7)
    array = cublas_on_cpu.on_host(records['row'])
    assert array.strides == (29, 4)
    assert gemm._laid_out(array)[0] is not array
    b = random(7, 3)
    check(gemm.Blas().dot(array, host.put(b)), numpy.dot, records['row'], b, 'float32')


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_products_with_selected_matrices(place, dtype):
    blas = gemm.Blas()
    a, b = random(4, 5, 7, dtype=dtype), random(3, 7, 2, dtype=dtype)
    which = numpy.array([2, 0, 0, 1], 'i')
    for layouts in itertools.product(STACK_LAYOUTS, repeat=2):
        x, y = (laid_out(place, array, layout) for array, layout in zip((a, b), layouts))
        actual = blas.dot_selected(x, y, place.put(which))
        check(actual, numpy.matmul, a, b[which], dtype)


def test_tf32_with_selected_matrices_only_where_addresses_are_aligned(host, monkeypatch):
    """cuBLAS reads 16 bytes at a time in TF32, and only its caller knows the addresses."""
    blas = gemm.Blas()
    asked = []
    call = blas._library.gemm_batched_ex
    monkeypatch.setattr(
        blas._library, 'gemm_batched_ex', lambda *words: asked.append(words[-2]) or call(*words)
    )
    host.streams.compute_type = gemm.CUPY_TF32
    which = host.put(numpy.zeros(2, 'i'))
    for m, k, n in ((4, 4, 3), (3, 5, 4), (4, 5, 3), (3, 4, 5)):  # each of the last has 15 numbers
        blas.dot_selected(host.put(random(2, m, k)), host.put(random(1, k, n)), which)
    assert asked == [gemm.COMPUTE_32F_FAST_TF32] + 3 * [gemm.COMPUTE_32F]
    host.streams.compute_type = gemm.CUPY_PEDANTIC
    blas.dot_selected(host.put(random(2, 3, 5)), host.put(random(1, 5, 4)), which)
    assert asked[-1] == gemm.COMPUTE_32F_PEDANTIC


def test_products_with_selected_matrices_are_not_of_float16(host):
    a = host.put(random(2, 3, 3, dtype='float16'))
    with pytest.raises(TypeError, match='^a: expected float32 or float64, got float16$'):
        gemm.Blas().dot_selected(a, a, host.put(numpy.zeros(2, 'i')))


@pytest.mark.parametrize('shapes', [((0, 5, 7), (3, 7, 2)), ((2, 5, 0), (3, 0, 2))], ids=str)
def test_products_with_selected_matrices_of_no_elements(place, shapes):
    a, b = (place.put(numpy.ones(shape, 'f')) for shape in shapes)
    y = gemm.Blas().dot_selected(a, b, place.put(numpy.zeros(len(a), 'i')))
    assert y.shape == (len(a), 5, 2) and not cuda.to_cpu(y).any()


@pytest.mark.parametrize('dtype', DTYPES)
def test_factors_with_strides_of_zero(place, dtype):
    """The factors have repeated rows and repeated columns."""
    blas = gemm.Blas()
    a = random(1, 7, dtype=dtype)
    b = random(7, 1, dtype=dtype)
    xp = numpy if isinstance(place, OnHost) else cuda.cupy
    options = {'subok': True} if xp is numpy else {}
    rows = xp.broadcast_to(place.put(a), (5, 7), **options)
    columns = xp.broadcast_to(place.put(b), (7, 3), **options)
    check(blas.dot(rows, columns), numpy.dot, numpy.repeat(a, 5, 0), numpy.repeat(b, 3, 1), dtype)


@pytest.mark.parametrize('dtype', DTYPES)
def test_vectors(place, dtype):
    blas = gemm.Blas()
    for shape_a, shape_b in (((7,), (7,)), ((7,), (7, 3)), ((5, 7), (7,)), ((1,), (1,))):
        a, b = random(*shape_a, dtype=dtype), random(*shape_b, dtype=dtype)
        expected = numpy.asarray(a.astype('d').dot(b.astype('d')))
        for product in (blas.dot, blas.matmul):
            y = product(place.put(a), place.put(b))
            assert not isinstance(y, numpy.floating)
            assert_close(y, expected, dtype)
    # One factor has every second element, the other one in reverse order.
    a = random(14, dtype=dtype)
    y = blas.dot(place.put(a)[::2], place.put(a)[::-2])
    assert_close(y, numpy.asarray(a[::2].astype('d').dot(a[::-2].astype('d'))), dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    'a, b',
    [
        ((0, 7), (7, 3)),
        ((5, 0), (0, 3)),
        ((5, 7), (7, 0)),
        ((0, 0), (0, 0)),
        ((0,), (0,)),
        ((2, 5, 0), (2, 0, 3)),
        ((0, 5, 7), (0, 7, 3)),
        ((0, 5, 7), (7, 3)),
        ((2, 0, 7), (1, 7, 3)),
    ],
)
def test_empty(place, a, b, dtype):
    y = gemm.Blas().matmul(place.empty(a, dtype), place.empty(b, dtype))
    assert_close(y, numpy.matmul(numpy.zeros(a), numpy.zeros(b)), dtype)


@pytest.mark.parametrize('dtypes', list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_mixed_dtypes(place, dtypes):
    blas = gemm.Blas()
    a, b = random(5, 7, dtype=dtypes[0]), random(7, 3, dtype=dtypes[1])
    expected = numpy.result_type(*dtypes)
    check(blas.dot(place.put(a), place.put(b)), numpy.dot, a, b, expected)
    check(blas.matmul(place.put(a[None]), place.put(b)), numpy.matmul, a[None], b, expected)
    check(blas.dot(place.put(a.T.copy()).T, place.put(b)), numpy.dot, a, b, expected)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('size, m, k, n', [(4, 5, 7, 3), (1, 5, 7, 3), (4, 1, 7, 1), (4, 5, 1, 3)])
def test_stacks(place, size, m, k, n, dtype):
    blas = gemm.Blas()
    a = random(size, m, k, dtype=dtype)
    b = random(size, k, n, dtype=dtype)
    for layouts in itertools.product(STACK_LAYOUTS, repeat=2):
        x, y = (laid_out(place, array, layout) for array, layout in zip((a, b), layouts))
        check(blas.matmul(x, y), numpy.matmul, a, b, dtype)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(
    'a, b',
    [
        ((5, 7), (4, 7, 3)),
        ((4, 5, 7), (7, 3)),
        ((1, 5, 7), (4, 7, 3)),
        ((4, 5, 7), (1, 7, 3)),
        ((2, 4, 5, 7), (4, 7, 3)),
        ((2, 1, 5, 7), (1, 4, 7, 3)),
        ((7,), (4, 7, 3)),
        ((4, 5, 7), (7,)),
        ((2, 4, 5, 7), (7,)),
    ],
)
def test_broadcast_stacks(place, a, b, dtype):
    a, b = random(*a, dtype=dtype), random(*b, dtype=dtype)
    check(gemm.Blas().matmul(place.put(a), place.put(b)), numpy.matmul, a, b, dtype)


@pytest.mark.parametrize(
    'product, a, b, error, message',
    [
        (
            'dot',
            numpy.ones((2, 2), 'i'),
            numpy.ones((2, 2)),
            TypeError,
            'a: expected float16, float32 or float64, got int32',
        ),
        (
            'dot',
            numpy.ones((2, 2)),
            numpy.ones((2, 2), complex),
            TypeError,
            'b: expected float16, float32 or float64, got complex128',
        ),
        (
            'dot',
            numpy.ones((2, 3)),
            numpy.ones((2, 3)),
            ValueError,
            r'b: expected 3 rows to go with a of shape \(2, 3\), got shape \(2, 3\)',
        ),
        (
            'dot',
            numpy.ones(3),
            numpy.ones(2),
            ValueError,
            r'b: expected 3 rows to go with a of shape \(1, 3\), got shape \(2, 1\)',
        ),
        (
            'dot',
            numpy.ones((1, 2, 3)),
            numpy.ones((3, 2)),
            ValueError,
            r'a, b: expected one or two dimensions, got shapes \(1, 2, 3\) and \(3, 2\)',
        ),
        (
            'dot',
            numpy.ones(()),
            numpy.ones(2),
            ValueError,
            r'a, b: expected one or two dimensions, got shapes \(\) and \(2,\)',
        ),
        (
            'matmul',
            numpy.ones((2, 2, 3)),
            numpy.ones((2, 2, 3)),
            ValueError,
            r'b: expected 3 rows to go with a of shape \(2, 2, 3\), got shape \(2, 2, 3\)',
        ),
        ('matmul', numpy.ones((2, 2, 3)), numpy.ones((3, 3, 2)), ValueError, 'broadcast'),
    ],
)
def test_what_is_refused(place, product, a, b, error, message):
    with pytest.raises(error, match=message):
        getattr(gemm.Blas(), product)(place.put(a), place.put(b))


def test_another_device_is_refused(host):
    a = cublas_on_cpu.on_host(numpy.ones((2, 2)))
    b = a.copy()
    b.device_id = 1
    message = '^b: expected an array on device 0, like the cuBLAS handle, got device 1$'
    with pytest.raises(ValueError, match=message):
        gemm.Blas().dot(a, b)


def test_more_than_an_int_holds_is_refused(host):
    row = host.put(numpy.ones(1, 'f'))
    wide = numpy.lib.stride_tricks.as_strided(row, (1, 2**31), (0, 4), subok=True)
    with pytest.raises(
        ValueError,
        match=r'a, b: expected dimensions and strides below 2\*\*31, got shapes \(1, 1\) and '
        r'\(1, 2147483648\)',
    ):
        gemm.Blas().dot(row[:, None], wide)


@pytest.fixture
def library():
    """Stand-in for cuBLAS, with functions that read the stream and the math mode of a handle."""
    library = ctypes.CDLL(cublas_on_cpu.path())
    library.stream_of.restype = ctypes.c_void_p
    library.stream_of.argtypes = library.math_mode.argtypes = [ctypes.c_void_p]
    return library


def test_math_mode_of_a_handle(host, library):
    assert library.math_mode(gemm.Blas()._handle) == 16


def test_products_follow_the_current_stream(host, library):
    # The stand-in refuses products without a workspace, which a change of the stream takes away.
    blas = gemm.Blas()
    a = host.put(random(3, 3))
    assert library.stream_of(blas._handle) == 1
    changes = []
    set_stream = blas._library.set_stream

    def note(*arguments):
        changes.append(arguments)
        return set_stream(*arguments)

    blas._library.set_stream = note
    for number, n_changes in ((1, 0), (2, 1), (2, 1), (1, 2)):
        host.streams.current.ptr = number
        check(blas.dot(a, a), numpy.dot, a, a, 'float32')
        assert library.stream_of(blas._handle) == number
        assert len(changes) == n_changes


def test_the_handle_goes_with_the_object(host, library):
    before = library.live_handles()
    first, second = gemm.Blas(), gemm.Blas()
    assert library.live_handles() == before + 2
    del first
    assert library.live_handles() == before + 1
    del second
    assert library.live_handles() == before


@pytest.mark.gpu
def test_one_handle_after_another_on_a_device():
    a = cuda.cupy.ones((3, 3), 'f')
    for _ in range(5):
        assert (gemm.Blas().dot(a, a) == 3).all()


def test_errors_have_names(place):
    blas = gemm.Blas()
    a = place.put(numpy.ones((2, 2), 'f'))
    matrix = a.data.ptr, gemm.DATA_TYPES['f'], 2  # the last is the leading dimension
    factor = gemm.FACTORS['f'].ctypes.data
    with pytest.raises(Exception, match='INVALID_VALUE'):
        blas._library.gemm_ex(
            blas._handle,
            0,  # neither factor is transposed
            0,
            -1,  # rows of the result
            2,  # its columns
            2,  # terms of each sum
            factor,
            *matrix,
            *matrix,
            factor,
            *matrix,
            gemm.COMPUTE_32F,
            gemm.DEFAULT_ALGORITHM,
        )


@pytest.mark.parametrize(
    'number, name',
    [
        (1, 'NOT_INITIALIZED'),
        (3, 'ALLOC_FAILED'),
        (7, 'INVALID_VALUE'),
        (8, 'ARCH_MISMATCH'),
        (11, 'MAPPING_ERROR'),
        (13, 'EXECUTION_FAILED'),
        (14, 'INTERNAL_ERROR'),
        (15, 'NOT_SUPPORTED'),
        (16, 'LICENSE_ERROR'),
    ],
)
def test_errors_have_the_names_of_cublas_h(number, name):
    with pytest.raises(RuntimeError, match='CUBLAS_STATUS_' + name):
        gemm._checked('symbol', lambda: number)


def test_unknown_errors_have_numbers(host):
    with pytest.raises(RuntimeError, match=r'symbol: CUBLAS_STATUS_.*\(99\)'):
        gemm._checked('symbol', lambda: 99)


@pytest.mark.parametrize(
    'told, single, double',
    [
        (0, gemm.COMPUTE_32F, gemm.COMPUTE_64F),
        (1, gemm.COMPUTE_32F, gemm.COMPUTE_64F),
        (2, gemm.COMPUTE_32F_PEDANTIC, gemm.COMPUTE_64F_PEDANTIC),
        (7, gemm.COMPUTE_32F_FAST_TF32, gemm.COMPUTE_64F),
    ],
)
def test_compute_type_is_what_cupy_was_told(host, told, single, double):
    host.streams.compute_type = told
    assert gemm.compute_type(numpy.dtype('f')) == single
    assert gemm.compute_type(numpy.dtype('d')) == double
    half = gemm.COMPUTE_32F_PEDANTIC if told == 2 else gemm.COMPUTE_32F
    assert gemm.compute_type(numpy.dtype('e')) == half
    a = host.put(random(3, 3))
    check(gemm.Blas().dot(a, a), numpy.dot, a, a, 'float32')


@pytest.mark.gpu
@pytest.mark.parametrize('size', [16, 64, 512, 2048])
def test_float32_is_no_tf32(size):
    # TF32 has 10 bits, so it would round 1 + 2**-12 to 1. Sums are exact, because all else is 0.
    cupy = cuda.cupy
    a = cupy.eye(size, dtype='f') * numpy.float32(1 + 2**-12)
    x = cupy.full((size, size), 1 + 2**-11, 'f')
    expected = numpy.float32((1 + 2.0**-12) * (1 + 2.0**-11))
    blas = gemm.Blas()
    assert (blas.dot(a, x) == expected).all()
    assert (blas.matmul(a[None], x[None]) == expected).all()


@pytest.mark.gpu
def test_float16_sums_in_float32():
    # Terms are 4096 ones and 2048 times 2**-2. A float16 sum would stop at 2048.
    a = cuda.cupy.ones((8, 6144), 'e')
    a[:, 4096:] = 0.25
    blas = gemm.Blas()
    ones = cuda.cupy.ones((6144, 8), 'e')
    assert (blas.dot(a, ones) == 4608).all()
    assert (blas.matmul(a[None], ones[None]) == 4608).all()


@pytest.mark.gpu
@pytest.mark.parametrize('dtype', DTYPES)
def test_captured_is_eager_to_the_bit(monkeypatch, dtype):
    cupy = cuda.cupy
    poisoned(monkeypatch, cupy)
    a, b = (cupy.asarray(random(*shape, dtype=dtype)) for shape in ((130, 64), (64, 33)))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        blas = gemm.Blas()

        def products():
            y = blas.dot(a, b)
            return y, blas.dot(y.T, a), blas.matmul(a[None], b), blas.dot(a[0], a[1])

        for _ in range(2):
            products()
        stream.synchronize()
        stream.begin_capture()
        captured = products()
        graph = stream.end_capture()
        for factor in (1, -0.5):
            a *= a.dtype.type(factor)
            graph.launch(stream)
            stream.synchronize()
            for actual, expected in zip(captured, products()):
                assert (actual == expected).all()


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('m, k, n', [(5, 7, 3), (5, 0, 3), (0, 7, 3)])
def test_a_product_is_added_in_place(place, m, k, n, dtype):
    a, b, c = random(m, k, dtype=dtype), random(k, n, dtype=dtype), random(m, n, dtype=dtype)
    to = place.put(c.copy())
    assert gemm.Blas().dot(place.put(a), place.put(b), to) is to
    assert_close(to, a.astype('d') @ b.astype('d') + c, dtype)


def test_a_product_outside_of_a_step_is_added_in_place(xp):
    a, b, c = random(5, 7), random(7, 3), random(5, 3)
    to = xp.asarray(c.copy())
    assert gemm.dot(xp.asarray(a), xp.asarray(b), to) is to
    assert_close(to, a.astype('d') @ b.astype('d') + c, 'f')


@pytest.mark.parametrize(
    'width, n_rows, n_matrices, dtype',
    pairs([1, 16, 64], [1, 600, 2300, 18000, 10**6], [1, 4], DTYPES),
)
def test_layers_of_up_to_64_units_stay_kernels(monkeypatch, width, n_rows, n_matrices, dtype):
    monkeypatch.setattr(gemm, 'is_tf32', lambda dtype: False)
    for n_in, n_out in (width, 512), (512, width), (width, width):
        assert not gemm.products_are_faster(
            numpy.dtype(dtype), n_rows=n_rows, n_in=n_in, n_out=n_out, n_matrices=n_matrices
        )


@pytest.mark.parametrize(
    'width, n_rows, n_matrices, is_tf32, expected',
    [
        (256, 600, 1, False, False),
        (256, 1023, 4, False, False),
        (256, 1024, 4, False, True),
        (255, 4095, 4, False, False),
        (192, 4095, 4, False, False),
        (192, 4096, 4, False, True),
        (191, 8191, 1, False, False),
        (96, 8191, 1, False, False),
        (96, 8192, 1, False, True),
        (96, 8192, 2, False, False),
        (95, 8192, 1, False, False),
        (256, 2300, 4, False, True),
        (192, 2300, 1, False, False),
        (128, 18000, 1, False, True),
        (128, 18000, 4, False, False),
        (256, 600, 1, True, True),
        (128, 600, 4, True, True),
    ],
)
def test_wide_layers_are_products(monkeypatch, width, n_rows, n_matrices, is_tf32, expected):
    monkeypatch.setattr(gemm, 'is_tf32', lambda dtype: is_tf32)
    sizes = {'n_rows': n_rows, 'n_in': width, 'n_out': width, 'n_matrices': n_matrices}
    assert gemm.products_are_faster(numpy.dtype('f'), **sizes) is expected
    assert not gemm.products_are_faster(numpy.dtype('d'), **sizes)


@pytest.mark.parametrize(
    'n_in, n_out, expected',
    [
        (64, 64, False),
        (128, 64, False),  # RelGCN's second layer
        (64, 256, True),  # its readout, of 256 units
        (256, 64, True),
        (32, 1024, False),
        (96, 96, False),
        (128, 128, True),
    ],
)
def test_widths_that_are_products_in_tf32(monkeypatch, n_in, n_out, expected):
    """The number of rows must not matter, because spare rows would change a layer's precision."""
    monkeypatch.setattr(gemm, 'is_tf32', lambda dtype: True)
    for n_rows in (1, 600, 2300, 18000, 10**6):
        found = gemm.products_are_faster(
            numpy.dtype('f'), n_rows=n_rows, n_in=n_in, n_out=n_out, n_matrices=1
        )
        assert found is expected


def test_dot_outside_of_a_step_is_the_arrays_own(xp):
    a, b = xp.asarray(random(64, 33)), xp.asarray(random(33, 17))
    assert (gemm.dot(a, b) == a.dot(b)).all()
    assert gemm.dot(a, b).flags.c_contiguous


def test_dot_in_a_step():
    class Array:  # no array of NumPy's
        def dot(self, other):
            return 'its own product'

    a = Array()
    b = Array()
    calls = []

    def dot(*factors):
        calls.append(factors)
        return 'the product'

    blas = types.SimpleNamespace(dot=dot)
    with step.under_way(step.Step(blas, 0, None)):
        assert gemm.dot(a, b) == 'the product'
        x = random(3, 3)
        assert (gemm.dot(x, x) == x.dot(x)).all()
    assert calls == [(a, b, None)]
    assert gemm.dot(a, b) == 'its own product'


@pytest.mark.gpu
def test_dot_in_a_step_on_a_device():
    a, b = cuda.cupy.asarray(random(64, 33)), cuda.cupy.asarray(random(33, 17))
    blas = gemm.Blas()
    with step.under_way(step.Step(blas, 0, None)):
        assert (gemm.dot(a, b) == blas.dot(a, b)).all()


@pytest.mark.parametrize(
    'version, platform, name',
    [
        (11080, 'linux', 'libcublas.so.11'),
        (13020, 'linux', 'libcublas.so.13'),
        (11020, 'win32', 'cublas64_11.dll'),
        (12090, 'win32', 'cublas64_12.dll'),
    ],
)
def test_name_of_the_library_that_cupy_loads(monkeypatch, version, platform, name):
    runtime = types.SimpleNamespace(runtimeGetVersion=lambda: version)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(cuda, 'cupy', cupy, raising=False)
    monkeypatch.setattr(gemm.sys, 'platform', platform)
    assert gemm.name_of_library() == name


@pytest.mark.gpu
def test_name_is_that_of_a_library_that_is_loaded():
    gemm.cublas()
    assert '/%s' % gemm.name_of_library() in pathlib.Path('/proc/self/maps').read_text()
