"""TensorFlow's product of the report, the only kernel of the benchmarks, on the CPU."""

import pathlib
import shutil
import subprocess

import numpy
import pytest

from tests.emulation.emulator.cuda_on_cpu import MEMORY, RACES, build, knows, run

SOURCE = pathlib.Path(__file__).parents[2] / 'benchmarks' / 'peers' / 'tensorflow_spmm.cu'


@pytest.mark.parametrize(
    'sanitizer', [None, *(pytest.param(each, marks=pytest.mark.slow) for each in (MEMORY, RACES))]
)
@pytest.mark.parametrize('n_b, threads', [(1, 32), (7, 64), (33, 256)])
def test_product(gxx, sanitizer, n_b, threads):
    if sanitizer and not knows(sanitizer=sanitizer):
        pytest.skip('g++ -fsanitize=%s does not work here' % sanitizer)
    rng = numpy.random.RandomState(0)
    dense = rng.randint(-3, 4, (9, 9)).astype('f')  # sums of small integers are exact in any order
    ids = numpy.ascontiguousarray(numpy.argwhere(dense), 'i')
    rng.shuffle(ids)
    values = dense[ids[:, 0], ids[:, 1]]
    b = rng.randint(-3, 4, (9, n_b)).astype('f')
    c = numpy.zeros((9, n_b), 'f')
    program = build(SOURCE.read_text(), 'tensorflow_spmm', sanitizer=sanitizer)
    n_blocks = -(-len(ids) * n_b // threads)
    arguments = ids, values, b, c, numpy.int32(len(ids)), numpy.int32(n_b)
    run(program, (n_blocks, 1, 1), (threads, 1, 1), arguments)
    numpy.testing.assert_array_equal(c, dense @ b)


@pytest.mark.slow
def test_nvcc_compiles_it_without_a_warning(tmp_path):
    if shutil.which('nvcc') is None:
        pytest.skip('nvcc is not on the PATH')
    options = '-std=c++17', '-arch=sm_90', '-cubin', '-Werror=all-warnings'
    command = ['nvcc', *options, '-o', str(tmp_path / 'kernel.cubin'), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
