"""The kernels as NVIDIA's compiler sees them; no GPU is needed for that."""
import shutil
import subprocess

import pytest

from chainer_bspmm.backend import kernels

# The widest and the narrowest vector of every storage dtype. The other constants take turns (MAX
# is there twice, else it would meet narrow vectors only).
STORAGE = [('e', 8), ('e', 1), ('f', 4), ('f', 1), ('d', 2), ('d', 1)]
CONSTANTS = {
    'bspmm_csr': [('WEIGHTS', weights) for weights in (0, 1, 2)],
    'bsddmm_csr': [('LANES', lanes) for lanes in (1, 2, 4, 8, 16, 32)],
    'segment_reduce': [('OPERATION', 'SUM'), ('OPERATION', 'MAX'), ('OPERATION', 'MAX')],
    'bsddmm_coo': [('LANES', lanes) for lanes in (1, 2, 4, 8, 16, 32)],
    'segment_broadcast': [],
}
# Kernels that take one element at a time, of float32 or float64: dtype and all the constants.
ST_KERNELS = ('bspmm_st_shared', 'bspmm_st_global')
ST_CONSTANTS = [('f', 1, 0, 0), ('f', 32, 1, 1), ('d', 4, 1, 0), ('d', 32, 0, 1)]


def test_every_kernel_is_compiled():
    assert {path.stem for path in kernels.directory().glob('*.cu')} == {
        *CONSTANTS, *ST_KERNELS}


@pytest.mark.parametrize('dtype, width', STORAGE)
@pytest.mark.parametrize('name', CONSTANTS)
def test_kernel_compiles_without_a_warning(tmp_path, name, dtype, width):
    defines = [('VECTOR', width)]
    if CONSTANTS[name]:
        defines.append(CONSTANTS[name][STORAGE.index((dtype, width)) % len(CONSTANTS[name])])
    compile_kernel(tmp_path, name, dtype, defines)


@pytest.mark.parametrize('dtype, subwarp, weights, trans', ST_CONSTANTS)
@pytest.mark.parametrize('name', ST_KERNELS)
def test_st_kernel_compiles_without_a_warning(tmp_path, name, dtype, subwarp, weights, trans):
    compile_kernel(tmp_path, name, dtype, [
        ('VECTOR', 1), ('SUBWARP', subwarp), ('WEIGHTS', weights), ('TRANS', trans)])


def compile_kernel(tmp_path, name, dtype, defines):
    if shutil.which('nvcc') is None:
        pytest.skip('nvcc is not on the PATH')
    # The file itself: in the text that CuPy compiles, `#pragma once` stands in the main file.
    done = subprocess.run(
        ['nvcc', *kernels.options(dtype, defines), '-arch=sm_90', '-cubin', '-Werror=all-warnings',
         '-o', str(tmp_path / 'kernel.cubin'), str(kernels.directory() / (name + '.cu'))],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
