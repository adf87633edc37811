"""Kernels without a GPU: g++ builds them, and a stand-in for CuPy lets the package choose, launch
and call them. README.md says which faults a run can and cannot show."""

import ctypes
import functools
import itertools
import operator
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import types

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels, launch, plans
from tests.emulation.emulator import cache
from tests.support.launches import DeviceArray, placed

FOLDER = pathlib.Path(__file__).resolve().parent
# Values of -fsanitize. MEMORY finds accesses outside arrays and unaligned vectors, RACES finds data
# races.
MEMORY, RACES = 'address,undefined', 'thread'
# Memory that a program holds at its end is no fault of a kernel.
ENVIRONMENT = dict(os.environ, ASAN_OPTIONS='detect_leaks=0')
SECONDS = 120  # a run takes about one; deadlocks are found without waiting
# Checks that need no library, for runs without a sanitizer: they end in a signal, which the engine
# reports.
CHECKS = '-fsanitize=alignment,bounds', '-fsanitize-undefined-trap-on-error'
ENTRY = """#include "cuda_on_cpu.h"
%s
extern "C" __attribute__((visibility("default"))) const char *run_kernel(char **argv)
{
    return launch(%s, argv);
}
"""

_files = tempfile.TemporaryDirectory(prefix='cuda_on_cpu-')
_numbers = itertools.count()


class KernelError(Exception):
    """Undefined behaviour of a kernel on a GPU, reported by the engine or a sanitizer."""


@functools.lru_cache(maxsize=None)
def has_compiler():
    return shutil.which('g++') is not None and knows('int main() { if constexpr (true) return 0; }')


@functools.lru_cache(maxsize=None)
def knows(text='int main() {}', sanitizer=None):
    """Return whether g++ builds a C++17 program that runs on this machine."""
    options = ['-fsanitize=' + sanitizer] if sanitizer else []

    def probe():
        path = pathlib.Path(_files.name) / ('probe-%d' % next(_numbers))
        command = ['g++', '-std=c++17', '-pthread', *options, '-x', 'c++', '-', '-o', str(path)]
        built = subprocess.run(command, input=text, capture_output=True, text=True)
        if built.returncode:
            return 'no'
        done = subprocess.run([str(path)], env=ENVIRONMENT, capture_output=True)
        return 'no' if done.returncode else 'yes'

    return cache.cached_text(probe, 'probe', cache.version('g++'), text, options) == 'yes'


def _compile(suffix, text, *options, engine=None):
    """Compile a text that may include headers of this folder; return the path of the result."""
    headers = [path.read_text() for path in sorted(FOLDER.glob('*.h'))]
    level = '-O0' if engine else '-O1'  # compiling takes longer than running
    linked = []
    if engine is not None and engine.suffix == '.so':  # both files are in one folder: $ORIGIN
        # The engine has the standard libraries; linking them again takes as long as compiling.
        linked = ['-nostdlib', '-L%s' % engine.parent, '-l:' + engine.name, '-Wl,-rpath,$ORIGIN']
    elif engine is not None:
        linked = ['-x', 'none', engine]
    return cache.cached(
        lambda path: cache.compile_cpp(path, text, level, '-I%s' % FOLDER, *options, after=linked),
        suffix,
        cache.version('g++'),
        headers,
        text,
        options,
        level,
        engine and engine.name,
    )


@functools.lru_cache(maxsize=None)
def _engine(sanitizer):
    """Return the path of the engine, a library, or an object file for a program."""
    threads = 'threads.cpp' if sanitizer == RACES else 'fibers.cpp'
    text = ''.join((FOLDER / name).read_text() for name in ('engine.cpp', threads))
    if sanitizer is None:
        return _compile('.so', text, '-DIN_PROCESS', '-shared', '-fPIC')
    # ThreadSanitizer must not see how the engine synchronises lanes.
    options = ['-DOS_THREADS'] if sanitizer == RACES else ['-fsanitize=' + sanitizer]
    return _compile('.o', text, '-g1', '-pthread', *options, '-c')


@functools.lru_cache(maxsize=None)
def build(text, entry, options=(), sanitizer=None):
    """Compile the kernel `entry` of a CUDA source.

    Returns:
        The kernel for :func:`run`: a function in this process, or, with a sanitizer, the path of a
        program.
    """
    # No macro could turn the declaration of this array into that of a pointer.
    text = re.sub(
        r'extern __shared__ (\w+) (\w+)\[\];',
        r'\1 *const \2 = static_cast<\1 *>(dynamic_shared());',
        text,
    )
    text, engine = ENTRY % (text, entry), _engine(sanitizer)
    if sanitizer is None:
        options = *options, *CHECKS, '-fvisibility=hidden', '-shared', '-fPIC'
        function = ctypes.CDLL(str(_compile('.so', text, *options, engine=engine))).run_kernel
        function.restype = ctypes.c_char_p
        return function
    options = *options, '-g1', '-pthread', '-fsanitize=' + sanitizer, '-fno-sanitize-recover=all'
    if sanitizer == RACES:
        options = *options, '-DOS_THREADS'
    return _compile('', text, *options, engine=engine)


def run(kernel, grid, block, arguments, shared_bytes=0, reachable=()):
    """Run a kernel with NumPy arrays, which it may change, NumPy numbers and bare pointers.

    Memory behind a bare pointer (``numpy.uintp``) is neither copied nor checked.

    An array that is passed twice is a single array for the kernel, too. A structured array of size
    one is a struct that is passed by value. If that, or an array of uint64, holds the address of
    one of the `reachable` arrays, the kernel finds a pointer to that array.

    Raises:
        KernelError: the kernel has undefined behaviour on a GPU; the message has the report.
    """
    in_process = not isinstance(kernel, pathlib.Path)
    words = []
    files = {}
    kept = []

    def sent(array):
        assert array.flags.c_contiguous
        place, n_bytes = array.ctypes.data, array.nbytes
        if not in_process and n_bytes:
            if (place, n_bytes) not in files:
                path = pathlib.Path(_files.name) / ('argument-%d' % len(files))
                array.tofile(path)
                files[place, n_bytes] = array, path
            return '%d:%d:%s' % (place % 64, n_bytes, files[place, n_bytes][1])
        return '%d:%d:%d' % (place % 64, n_bytes, place)

    at = {array.ctypes.data: array for array in reachable if array.size}
    for argument in arguments:
        if isinstance(argument, numpy.ndarray) and (
            argument.dtype.names or argument.dtype == numpy.uint64
        ):
            is_struct = bool(argument.dtype.names)
            assert not is_struct or (argument.size == 1 and argument.itemsize % 8 == 0)
            pointers = [
                '%d@%s' % (8 * i, sent(at[word]))
                for i, word in enumerate(argument.view(numpy.uint64).ravel().tolist())
                if word in at
            ]
            if pointers and not is_struct:
                kept.append((argument, argument.copy()))
            words.append(','.join([sent(argument), *pointers]))
        elif isinstance(argument, numpy.ndarray):
            words.append(sent(argument))
        elif isinstance(argument, numpy.uintp):
            words.append('@%d' % argument)
        else:
            assert isinstance(argument, (numpy.integer, numpy.floating))
            words.append(str(argument))
    # A quotient that is not rounded is a TypeError; the engine would read only its first digits.
    sizes = map(operator.index, (*grid, *block, shared_bytes))
    words = [*map(str, sizes), *words]
    if in_process:
        argv = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        report = kernel(argv)
        for argument, before in kept:
            argument[...] = before
        if report:
            raise KernelError(report.decode())
        return
    done = subprocess.run(
        [kernel, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        raise KernelError('status %d\n%s' % (done.returncode, done.stderr))
    for argument, path in files.values():
        after = numpy.fromfile(path, argument.dtype).reshape(argument.shape)
        if after.tobytes() != argument.tobytes():
            argument[...] = after
    for argument, before in kept:
        argument[...] = before


class Device:
    """Emulated GPU, for the duration of a test: the package's GPU code with kernels on the CPU.

    New arrays are filled with NaN, new arrays of integers with 127.

    Args:
        monkeypatch: pytest's.
        sanitizer (str or None): `MEMORY` or `RACES`.

    Attributes:
        launched (list): compile-time constants (dict) of every launch.
        names (set): names of the kernels that were launched.
        sizes (plans.Device): GPU for which plans are made.
        reachable (list): arrays whose addresses may be in structs or in tables.
    """

    def __init__(self, monkeypatch, sanitizer=None):
        if sanitizer and not knows(sanitizer=sanitizer):
            pytest.skip('g++ -fsanitize=%s does not work here' % sanitizer)
        self._sanitizer = sanitizer
        self.launched = []
        self.names = set()
        self.reachable = []
        monkeypatch.setattr(kernels, 'load', self._load)
        self.sizes = plans.Device(132, 60 << 20)
        monkeypatch.setattr(kernels, 'device', lambda device_id: self.sizes)
        monkeypatch.setattr(launch, 'on_gpu', lambda x: isinstance(x, DeviceArray))
        cupy = types.SimpleNamespace(
            empty=self._empty,
            array=lambda *array, **options: self.put(numpy.array(*array, **options)),
            ascontiguousarray=self._ascontiguousarray,
            zeros=self._zeros,
            _core=types.SimpleNamespace(get_compute_type=lambda dtype: 0),
            cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(getDevice=lambda: 0)),
        )
        monkeypatch.setattr(cuda, 'cupy', cupy)

    def put(self, array, shift=0):
        """Return a copy of an array that lies `shift` bytes past a multiple of 16."""
        return placed(array, shift)

    def _empty(self, shape, dtype):
        poison = numpy.nan if numpy.dtype(dtype).kind == 'f' else 127
        return self.put(numpy.full(shape, poison, dtype))

    def _zeros(self, shape, dtype):
        array = self._empty(shape, dtype)
        array[...] = 0
        return array

    def _ascontiguousarray(self, array):
        return array if array.flags.c_contiguous else self.put(array)

    def _load(self, device_id, name, dtype_char, defines):
        if dtype_char == 'e' and not knows('_Float16 x = 1; int main() { return x != 1; }'):
            pytest.skip('float16 needs a compiler with _Float16, such as g++ 12 on x86-64')
        options = kernels.options(dtype_char, defines)
        program = build(kernels.source(name), name, options, self._sanitizer)

        def kernel(grid, block, arguments, shared_mem=0):
            if min(*grid, *block) < 1:
                raise KernelError('%s: expected a block at least, got grid %s' % (name, grid))
            self.launched.append(dict(defines))
            self.names.add(name)
            run(program, grid, block, arguments, shared_mem, self.reachable)

        return kernel
