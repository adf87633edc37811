"""CUDA sources: where they are, compilation for a device, and a cache of compiled kernels."""

import concurrent.futures
import contextlib
import functools
import pathlib
import re
import threading

from chainer.backends import cuda

from chainer_bspmm.cuda import plans

# The kernels' names for storage dtypes, by NumPy's one-letter code.
STORAGE = {'e': '__half', 'f': 'float', 'd': 'double'}


@functools.lru_cache(maxsize=None)
def directory():
    """Return the folder of the CUDA sources: in the package, or next to it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    candidates = [package / 'kernels', package.parent / 'kernels']
    for folder in candidates:
        if (folder / 'common.cuh').is_file():
            return folder
    text = 'kernels: expected the CUDA sources in %s or %s, found neither; reinstall chainer_bspmm'
    raise FileNotFoundError(text % tuple(candidates))


def paths():
    """Return {name: pathlib.Path} of the kernels' ``.cu`` files, including those in ``papers/``."""
    return {path.stem: path for path in directory().rglob('*.cu')}


def source(name):
    """Return the text of a kernel's file with the headers inserted.

    CuPy's disk cache hashes the text that it compiles, but not the headers that the text includes.
    """
    path = paths()[name]
    parts = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        include = re.fullmatch(r'#include "(\w+\.cuh)"\n', line)
        if include is None:
            parts.append(line)
        else:
            header = (directory() / include[1]).read_text()
            parts += ['#line 1 "%s"\n' % include[1], header]
            parts.append('#line %d "%s"\n' % (number + 1, path.name))
    return ''.join(parts)


def options(dtype_char, defines):
    """Return the compiler options (tuple of str) for a storage dtype and (name, value) pairs."""
    return ('-std=c++17', '-DSTORAGE=' + STORAGE[dtype_char]) + tuple(
        '-D%s=%s' % (name, int(value) if isinstance(value, bool) else value)
        for name, value in defines
    )


@functools.lru_cache(maxsize=None)
def device(device_id):
    """Return the :class:`plans.Device` that describes a GPU."""
    properties = cuda.cupy.cuda.runtime.getDeviceProperties(device_id)
    return plans.Device(
        properties['multiProcessorCount'],
        properties['l2CacheSize'],
        properties['sharedMemPerBlockOptin'],
    )


class _Local(threading.local):
    together = None  # inside of `compiled_together`: a pool and the keys of the requested kernels


_local = _Local()


def load(device_id, name, dtype_char, defines):
    """Return a kernel as a compiled ``cupy.cuda.Function``; `name` is its file and entry point."""
    if _local.together is None:
        return _compiled(device_id, name, dtype_char, defines)
    pool, asked = _local.together
    key = device_id, name, dtype_char, defines
    if key not in asked:
        asked.add(key)
        pool.submit(_compiled_elsewhere, *key)
    return lambda *_, **__: None  # stands for the kernel, but launches nothing


@contextlib.contextmanager
def compiled_together():
    """Compile the kernels that this thread loads inside, several at a time; launches do nothing.

    Without it, each kernel is compiled at its first launch, which takes up to a second. Errors of
    the compiler are not raised here, but at that launch.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        _local.together = pool, set()
        try:
            yield
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            _local.together = None


def _compiled_elsewhere(device_id, *key):
    with cuda.cupy.cuda.Device(device_id):
        _compiled(device_id, *key)


@functools.lru_cache(maxsize=None)
def _compiled(device_id, name, dtype_char, defines):
    module = cuda.cupy.RawModule(code=source(name), options=options(dtype_char, defines))
    function = module.get_function(name)
    # More than 48 KB of shared memory must be requested. Launches that need less lose nothing.
    limit = device(device_id).shared_bytes
    function.max_dynamic_shared_size_bytes = limit - function.shared_size_bytes
    # The bare function is returned, because RawKernel would look up the device at every launch.
    return function.kernel
