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
    'segment_broadcast': [],
    # Several constants together. As many columns of x a thread as the policy gives it.
    'bspmm_sell': [(('TILE', tile), ('WEIGHTS', weights), ('WHOLE_WARPS', whole))
                   for tile, weights, whole in ((1, 1, 1), (8, 1, 0), (2, 0, 1),
                                                (8, 1, 1), (4, 1, 0), (8, 0, 0))],
    'spmv_csr': [(('LANES', lanes), ('WEIGHTS', weights))
                 for lanes, weights in ((1, 1), (2, 0), (4, 1), (8, 1), (16, 0), (32, 1))],
}


def test_every_kernel_is_compiled():
    assert {path.stem for path in kernels.directory().glob('*.cu')} == set(CONSTANTS)


@pytest.mark.parametrize('dtype, width', STORAGE)
@pytest.mark.parametrize('name', CONSTANTS)
def test_kernel_compiles_without_a_warning(tmp_path, name, dtype, width):
    if shutil.which('nvcc') is None:
        pytest.skip('nvcc is not on the PATH')
    defines = [('VECTOR', width)]
    if CONSTANTS[name]:
        chosen = CONSTANTS[name][STORAGE.index((dtype, width)) % len(CONSTANTS[name])]
        defines += chosen if isinstance(chosen[0], tuple) else [chosen]
    # The file itself: in the text that CuPy compiles, `#pragma once` stands in the main file.
    done = subprocess.run(
        ['nvcc', *kernels.options(dtype, defines), '-arch=sm_90', '-cubin', '-Werror=all-warnings',
         '-o', str(tmp_path / 'kernel.cubin'), str(kernels.directory() / (name + '.cu'))],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
