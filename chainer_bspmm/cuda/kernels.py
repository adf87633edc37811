"""Find the CUDA sources, compile them for a device, cache the compiled kernels."""

import concurrent.futures
import contextlib
import functools
import pathlib
import re
import threading

from chainer.backends import cuda

from chainer_bspmm.cuda import plans

# The kernels' names of storage dtypes, by NumPy's one-letter code.
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
    """Return {name: pathlib.Path} of the kernels: one ``.cu`` file each, here or in ``papers/``."""
    return {path.stem: path for path in directory().rglob('*.cu')}


def source(name):
    """Return the text of a kernel's file with the headers inserted.

    CuPy's disk cache hashes the text that it compiles, but not headers which that text includes.
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
    together = None  # a pool and the kernels that were asked for, inside of `compiled_together`


_local = _Local()


def load(device_id, name, dtype_char, defines):
    """Return the compiled ``cupy.cuda.Function`` of a kernel; `name`: its file and entry point."""
    if _local.together is None:
        return _compiled(device_id, name, dtype_char, defines)
    pool, asked = _local.together
    key = device_id, name, dtype_char, defines
    if key not in asked:
        asked.add(key)
        pool.submit(_compiled_elsewhere, *key)
    return lambda *_, **__: None  # launches nothing


@contextlib.contextmanager
def compiled_together():
    """Compile the kernels that this thread loads inside, several at a time; launches do nothing.

    Without it, each is compiled when it is first launched, in up to a second. Errors of the
    compiler are not raised here, but at that launch.
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
    # More than 48 KB must be asked for. It takes no memory from launches that need less.
    limit = device(device_id).shared_bytes
    function.max_dynamic_shared_size_bytes = limit - function.shared_size_bytes
    # The bare function: RawKernel would look up the device again at every launch.
    return function.kernel
