"""Run the kernels without a GPU: g++ builds them, and a stand-in for CuPy lets the GPU backend
itself choose, launch and call them. cuda_on_cpu.cpp says what a run can and cannot show."""

import functools
import itertools
import os
import pathlib
import re
import subprocess
import tempfile
import types

import numpy
import pytest

from chainer.backends import cuda

from chainer_bspmm import backend, papers
from chainer_bspmm.cuda import kernels, policy

FOLDER = pathlib.Path(__file__).resolve().parent
# For -fsanitize=. MEMORY: accesses outside arrays, vectors that are not aligned. RACES: data races.
MEMORY, RACES = 'address,undefined', 'thread'
# What a program still holds when it ends is no fault of a kernel.
ENVIRONMENT = dict(os.environ, ASAN_OPTIONS='detect_leaks=0')
SECONDS = 120  # a run takes about one; a deadlock is found without waiting

_built = tempfile.TemporaryDirectory(prefix='cuda_on_cpu-')
_numbers = itertools.count()


class KernelError(Exception):
    """A kernel run ended with a report of its own or of a sanitizer."""


def new_path(name):
    return pathlib.Path(_built.name) / ('%d-%s' % (next(_numbers), name))


def _compile(sanitizer, arguments):
    command = ['g++', '-std=c++17', '-O1', '-g1', '-pthread', '-I%s' % FOLDER]
    if sanitizer:
        command += ['-fsanitize=' + sanitizer, '-fno-sanitize-recover=all']
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)


def _must_compile(sanitizer, arguments):
    done = _compile(sanitizer, arguments)
    assert done.returncode == 0, done.stderr


@functools.lru_cache(maxsize=None)
def knows(text='int main() {}', sanitizer=None):
    """Return whether g++ builds a C++17 program that then runs on this machine."""
    path = new_path('probe')
    source = path.with_suffix('.cpp')
    source.write_text(text)
    return (
        _compile(sanitizer, [source, '-o', path]).returncode == 0
        and subprocess.run([path], env=ENVIRONMENT, capture_output=True).returncode == 0
    )


@functools.lru_cache(maxsize=None)
def _engine(sanitizer):
    path = new_path('engine.o')
    _must_compile(sanitizer, ['-c', FOLDER / 'cuda_on_cpu.cpp', '-o', path])
    return path


@functools.lru_cache(maxsize=None)
def build(text, entry, options=(), sanitizer=None):
    """Return the path of a program that runs the kernel `entry` of a CUDA source."""
    path = new_path(entry)
    source = path.with_suffix('.cpp')
    # No macro can turn this declaration of an array into one of a pointer.
    text = re.sub(
        r'extern __shared__ (\w+) (\w+)\[\];',
        r'\1 *const \2 = static_cast<\1 *>(dynamic_shared());',
        text,
    )
    source.write_text(
        '#include "cuda_on_cpu.h"\n%s\n'
        'int main(int, char **argv) { return launch(%s, argv); }\n' % (text, entry)
    )
    _must_compile(sanitizer, [*options, source, _engine(sanitizer), '-o', path])
    return path


def run(program, grid, block, arguments, shared_bytes=0, reachable=()):
    """Run a kernel on NumPy arrays, which it may change, NumPy numbers and null pointers.

    An array that comes twice is one array to the kernel too. A structured array of size one is a
    struct passed by value; where it holds the address of one of the `reachable` arrays, the struct
    holds a pointer to that.

    Raises:
        KernelError: the kernel did something that a GPU leaves undefined; the message says what.
    """
    words, files = [], {}

    def sent(array):
        assert array.flags.c_contiguous
        place = array.ctypes.data, array.nbytes
        if place not in files:
            files[place] = array, new_path('argument-%d' % len(words))
            array.tofile(files[place][1])
        return '%d:%s' % (array.ctypes.data % 64, files[place][1])

    at = {array.ctypes.data: array for array in reachable if array.size}
    for argument in arguments:
        if isinstance(argument, numpy.ndarray) and argument.dtype.names:
            assert argument.size == 1 and argument.itemsize % 8 == 0
            pointers = [
                '%d@%s' % (8 * i, sent(at[word]))
                for i, word in enumerate(argument.view(numpy.uint64).ravel().tolist())
                if word in at
            ]
            words.append(','.join([sent(argument), *pointers]))
        elif isinstance(argument, numpy.ndarray):
            words.append(sent(argument))
        elif isinstance(argument, (numpy.int32, numpy.uint32, numpy.float32, numpy.float64)):
            words.append(str(argument))
        else:
            assert isinstance(argument, numpy.uintp) and argument == 0
            words.append('null')
    done = subprocess.run(
        [program, *map(str, (*grid, *block, shared_bytes)), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if done.returncode:
        raise KernelError('status %d\n%s' % (done.returncode, done.stderr))
    for argument, file in files.values():
        after = numpy.fromfile(file, argument.dtype).reshape(argument.shape)
        if after.tobytes() != argument.tobytes():
            argument[...] = after
        file.unlink()


class DeviceArray(numpy.ndarray):
    """A NumPy array with the one attribute of a CuPy array that the backend asks for besides."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)


class Device:
    """The GPU backend with its kernels on the CPU, for the length of a test.

    New arrays are full of NaN, those of integers full of 127.

    Args:
        monkeypatch: pytest's.
        sanitizer (str or None): `MEMORY` or `RACES`.
        replace ((str, str) or None): a text that stands in the kernel once, and what to put in
            its place: a kernel broken on purpose.

    Attributes:
        launched (list): the compile-time constants (dict) of every launch.
        reachable (list): arrays to which structs passed by value hold pointers.
    """

    def __init__(self, monkeypatch, sanitizer=None, replace=None):
        if sanitizer and not knows(sanitizer=sanitizer):
            pytest.skip('g++ -fsanitize=%s does not work here' % sanitizer)
        self._sanitizer, self._replace = sanitizer, replace
        self.launched, self.reachable = [], []
        monkeypatch.setattr(kernels, 'load', self._load)
        monkeypatch.setattr(kernels, 'device', lambda device_id: policy.Device(132, 60 << 20))
        for rooms in (backend, papers):
            monkeypatch.setattr(
                rooms,
                '_module',
                lambda x, rooms=rooms: rooms.gpu if isinstance(x, DeviceArray) else rooms.cpu,
            )
        monkeypatch.setattr(
            cuda,
            'cupy',
            types.SimpleNamespace(
                empty=self._empty,
                ascontiguousarray=self._ascontiguousarray,
                zeros=lambda shape, dtype: self.put(numpy.zeros(shape, dtype)),
                cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(getDevice=lambda: 0)),
            ),
        )

    def put(self, array, shift=0):
        """Return a copy of an array that lies `shift` bytes past a multiple of 16."""
        memory = numpy.empty(array.nbytes + 32, numpy.uint8)
        start = -memory.ctypes.data % 16 + shift
        placed = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed.view(DeviceArray)

    def _empty(self, shape, dtype):
        poison = numpy.nan if numpy.dtype(dtype).kind == 'f' else 127
        return self.put(numpy.full(shape, poison, dtype))

    def _ascontiguousarray(self, array):
        return array if array.flags.c_contiguous else self.put(array)

    def _load(self, device_id, name, dtype_char, defines):
        if dtype_char == 'e' and not knows('_Float16 x = 1; int main() { return x != 1; }'):
            pytest.skip('float16 needs a compiler with _Float16, such as g++ 12 on x86-64')
        text = kernels.source(name)
        if self._replace:
            assert text.count(self._replace[0]) == 1, (
                'expected once in the kernel: %s' % (self._replace[0])
            )
            text = text.replace(*self._replace)
        program = build(text, name, kernels.options(dtype_char, defines), self._sanitizer)

        def kernel(grid, block, arguments, shared_mem=0):
            self.launched.append(dict(defines))
            run(program, grid, block, arguments, shared_mem, self.reachable)

        return kernel
