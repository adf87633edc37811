"""Kernels, compiled by NVIDIA's compiler for every architecture, for which no GPU is needed."""

import functools
import os
import re
import shutil
import subprocess

import numpy
import pytest

from chainer_bspmm.cuda import kernels
from chainer_bspmm.training import flat_gradients, peer_memory
from tests.emulation.emulator import cache
from tests.emulation.registry import KERNELS
from tests.support.devices import slow_unless


# Generations, from Turing on, that CuPy supports and this project names.
ARCHITECTURES = ('sm_75', 'sm_80', 'sm_90', 'sm_100', 'sm_120')


@functools.lru_cache(maxsize=None)
def known_architectures():
    return subprocess.check_output(['nvcc', '--list-gpu-code'], text=True).split()


def compiled(name, dtype, defines, architecture, *flags):
    """Return the report of ptxas for a kernel; skip the test if there is no compiler for it."""
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
    # The file is compiled, because the text that CuPy compiles has `#pragma once` in its main file.
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
    """Return the bytes of the stack, and the spilled bytes, of a report of ptxas."""
    assert 'bytes spill stores' in report, 'not a report of ptxas: ' + report
    stack = re.findall(r'(\d+) bytes stack frame', report)
    spilled = re.findall(r'(\d+) bytes spill (?:stores|loads)', report)
    return sum(map(int, stack)), sum(map(int, spilled))


QUICK = 'bspmm_csr', 'gated_step', 'graph_linear'


def cases():
    """Yield all variants for sm_90, and, in turn, a third of them for each other architecture."""
    for name, kernel in KERNELS.items():
        for turn, architecture in enumerate(ARCHITECTURES):
            for i, (dtype, defines) in enumerate(kernel.compiled()):
                if architecture == 'sm_90' or i % 3 == turn % 3:
                    yield slow_unless(
                        # Four floats, of the kernels that change most and need most registers.
                        name in QUICK and architecture == 'sm_90' and i == 2,
                        name,
                        architecture,
                        dtype,
                        defines,
                        id='%s-%s-%d' % (name, architecture, i),
                    )


@pytest.mark.parametrize('name, architecture, dtype, defines', list(cases()))
def test_kernel_compiles_without_a_warning_or_a_spill(name, architecture, dtype, defines):
    """No stack may be used either, because it would hold a copy of the kernel's table."""
    report = compiled(name, dtype, defines, architecture)
    assert usage(report) == (0, 0), 'bytes of the stack, and spilled bytes'


def test_spill_is_noticed():
    dtype, defines = KERNELS['segment_reduce'].compiled()[0]
    report = compiled('segment_reduce', dtype, defines, 'sm_90', '-maxrregcount=24')
    _, spilled = usage(report)
    assert spilled > 0


@pytest.mark.parametrize(
    'name, n_peers',
    [
        *(slow_unless(n == 2, 'flat_gradients', n) for n in (0, 2, 8)),
        *(slow_unless(n == 2, 'peer_sum', n) for n in (2, 8)),
    ],
)
def test_what_peers_write_meanwhile_is_read(tmp_path, name, n_peers):
    """A value and its turn are read by one access of 64 bits that bypasses caches of constants."""
    if shutil.which('nvcc') is None:
        pytest.skip('nvcc is not on the PATH')
    f = numpy.dtype('f')
    out = tmp_path / 'kernel.ptx'
    defines = peer_memory.defines(n_peers)
    if name == 'flat_gradients':
        defines = flat_gradients.defines(True, f, f, n_peers)
    options = kernels.options('f', defines)
    words = ['nvcc', *options, '-arch=sm_90', '-ptx', '-I%s' % kernels.directory(), '-o', out]
    subprocess.run([*map(str, words), str(kernels.paths()[name])], check=True)
    text = out.read_text()
    for access in ('st.relaxed.sys.global.u64', 'ld.relaxed.sys.global.u64'):
        assert (access in text) == (n_peers > 0)
