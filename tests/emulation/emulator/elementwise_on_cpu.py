"""CuPy's ElementwiseKernel without a GPU: g++ builds a loop around its operation."""

import ctypes
import functools

import numpy

from tests.emulation.emulator import cache

C_TYPES = {'e': '_Float16', 'f': 'float', 'd': 'double', 'i': 'int', '?': 'bool'}
HEADER = """
#include <algorithm>
#include <cmath>
#include <cstddef>
using std::max;
template <typename T> T rsqrt(T x) { return 1 / std::sqrt(x); }
"""


# option of NVRTC -> option of g++
OPTIONS = {'--fmad=false': '-ffp-contract=off'}


@functools.lru_cache(maxsize=None)
def _build(text, options):
    options = '-O1', '-Wall', '-Wextra', '-Werror', '-shared', '-fPIC', *options
    return ctypes.CDLL(str(cache.library(text, *options))).run


def _parameters(text):
    """Yield (is_raw, type, name) of each parameter of a declaration for CuPy."""
    for declaration in text.split(','):
        *raw, kind, name = declaration.split()
        assert raw in ([], ['raw'])
        yield bool(raw), kind, name


def elementwise(put, in_params, out_params, operation, name, options=(), preamble=''):
    """Return a stand-in for CuPy's ``ElementwiseKernel`` with the same arguments.

    put: function from a NumPy array to a device array. New outputs are filled with NaN. As in CuPy,
    arrays must have the declared types, and scalars are converted to them.
    """
    inputs, outputs = list(_parameters(in_params)), list(_parameters(out_params))
    parameters = inputs + outputs

    def kernel(*arguments):
        assert len(arguments) in (len(inputs), len(parameters)), name
        types = {'int32': numpy.dtype('i'), 'bool': numpy.dtype('?')}
        for (_, kind, label), argument in zip(parameters, arguments):
            if isinstance(argument, numpy.ndarray):
                assert types.setdefault(kind, argument.dtype) == argument.dtype, label
        shape = numpy.broadcast_shapes(
            *(
                argument.shape
                for (is_raw, _, _), argument in zip(parameters, arguments)
                if not is_raw and isinstance(argument, numpy.ndarray)
            )
        )
        results = list(arguments[len(inputs) :]) or [
            put(numpy.full(shape, numpy.nan, types[kind])) for _, kind, _ in outputs
        ]
        assert all(
            is_raw or result.shape == shape for (is_raw, _, _), result in zip(outputs, results)
        ), name
        places = []
        for (is_raw, kind, _), argument in zip(parameters, [*arguments[: len(inputs)], *results]):
            array = numpy.asarray(argument, types[kind])
            array = array if is_raw else numpy.broadcast_to(array, shape)
            places.append(numpy.array(array, order='C'))
        in_loop, signature = [], []
        for n, (is_raw, kind, label) in enumerate(parameters):
            constant = 'const ' if n < len(inputs) else ''
            c_type = C_TYPES[types[kind].char]
            signature.append('%s%s *_%s' % (constant, c_type, label))
            if is_raw:  # the name stands for a pointer to all elements
                named = '*%s = _%s' % (label, label)
            else:
                named = '&%s = _%s[i]' % (label, label)
            in_loop.append('%s%s %s; (void)%s;' % (constant, c_type, named, label))
        aliases = ' '.join(
            'using %s = %s;' % (kind, C_TYPES[dtype.char])
            for kind, dtype in types.items()
            if len(kind) == 1
        )
        run = _build(
            '%s%s\n%s\nextern "C" void run(long size, %s)\n{\n'
            'for (long i = 0; i < size; ++i) {\n%s\n%s;\n}\n}\n'
            % (HEADER, aliases, preamble, ', '.join(signature), '\n'.join(in_loop), operation),
            tuple(OPTIONS[option] for option in options),
        )
        addresses = [ctypes.c_void_p(place.ctypes.data) for place in places]
        run(ctypes.c_long(int(numpy.prod(shape))), *addresses)
        for result, place in zip(results, places[len(inputs) :]):
            result[...] = place
        return results[0] if len(results) == 1 else tuple(results)

    return kernel
