"""Repairs of ChainerMN's memory utility, with stand-ins for mpi4py and for the GPU."""

import textwrap

import pytest

_MEMORY_UTILITY = """
    import chainer_bspmm
    import sys, types
    from unittest import mock
    sys.modules['mpi4py'] = mock.MagicMock()
    sys.modules['mpi4py.MPI'] = sys.modules['mpi4py'].MPI
    import chainer
    import numpy
    from chainermn.communicators import _memory_utility
"""


@pytest.fixture
def run(forks):
    """Function that runs code in another process, and returns what it prints."""

    def run_code(code):
        done = forks.run(textwrap.dedent(_MEMORY_UTILITY + code))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_code


def test_kernels_include_half(run):
    printed = run("""
    chainer.cuda.raw = lambda code, name: (name, code)
    for make in (_memory_utility._cupy_batched_pack_params,
                 _memory_utility._cupy_batched_unpack_params):
        name, code = make()
        print(name, code.index('#include <cuda_fp16.h>') < code.index('half'))
    """)
    assert printed.splitlines() == [
        'cupy_batched_pack_params True',
        'cupy_batched_unpack_params True',
    ]


# Unpacks two gradients, of which the second is missing, from float16.
_UNPACKED = '''
    class Buffer:
        """Device memory: answers with the numbers 0, 1, 2, ..."""
        def to_device(self, array, size, offset, stream):
            assert array.dtype == 'e' and size == array.nbytes
            array[...] = numpy.arange(offset // 2, offset // 2 + array.size).reshape(array.shape)

    first = chainer.Parameter(numpy.zeros((2, 2), 'f'))
    first.grad = numpy.zeros((2, 2), 'f')
    kept = first.grad
    second = chainer.Parameter(numpy.zeros(3, 'e'))
    second.grad = None
    _memory_utility.unpack_params(
        [first, second], 'grad', Buffer(), numpy.float16, zero_fill=True)
'''


def test_unpack_converts_gradients_in_place(run):
    run(
        _UNPACKED
        + """
    assert first.grad is kept and first.grad.dtype == 'f'
    numpy.testing.assert_array_equal(first.grad, [[0, 1], [2, 3]])
    """
    )


def test_unpack_makes_missing_gradients(run):
    run(
        _UNPACKED
        + """
    assert second.grad.dtype == 'e'
    numpy.testing.assert_array_equal(second.grad, [4, 5, 6])
    """
    )
