"""Check an installed chainer_bspmm: run from an empty folder, in an environment without CuPy."""

import importlib.util
from pathlib import Path

import numpy

import chainer_bspmm
from chainer_bspmm.cuda import kernels
from chainer_bspmm.functions import bspmm

CHECKOUT = Path(__file__).resolve().parents[1]


def check_files(source, installed):
    """Every Python and CUDA file of a folder of the checkout has its installed copy."""
    assert CHECKOUT not in installed.resolve().parents, f'{installed} is not installed'
    files = [path for path in source.rglob('*') if path.suffix in ('.py', '.typed', '.cu', '.cuh')]
    assert files, f'{source} holds no source'
    for path in files:
        copy = installed / path.relative_to(source)
        assert copy.is_file() and copy.read_bytes() == path.read_bytes(), f'{copy} is not {path}'
    print(f'{installed}: {len(files)} files')


assert importlib.util.find_spec('cupy') is None, 'CuPy is installed here: this checks life without'
check_files(CHECKOUT / 'chainer_bspmm', Path(chainer_bspmm.__file__).parent)
check_files(CHECKOUT / 'kernels', kernels.directory())

matrices = [numpy.array([[0, 1], [2, 0]], 'f'), numpy.array([[3]], 'f')]
x = numpy.array([[1, 2], [3, 4], [5, 6]], 'f')
product = bspmm(chainer_bspmm.BatchedCSR.from_matrices(matrices), x).array
numpy.testing.assert_array_equal(product, [[3, 4], [2, 4], [15, 18]])
print('product: ok, NumPy', numpy.__version__)
