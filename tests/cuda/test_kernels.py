"""CUDA sources: how they are found and assembled."""

import concurrent.futures
import contextlib
import re
import threading
import types

import pytest

from chainer.backends import cuda

from chainer_bspmm.cuda import kernels


@pytest.mark.parametrize('name', kernels.paths())
def test_source_contains_each_header_once(name):
    text = kernels.source(name)
    assert text.count('using Real') == 1 and not re.search('#include ".*cuh"', text)
    # There are no headers of a host, because CuPy's compiler has only CUDA's.
    of_device = re.sub('#ifndef __CUDACC__.*?#endif', '', text, flags=re.DOTALL)
    assert set(re.findall('#include <(.*)>', of_device)) == {'cuda_fp16.h'}
    assert re.search(
        r'extern "C" __global__ void (__launch_bounds__\([\w,* ]+\) )?%s\(' % name, text
    )
    # Messages of the compiler name the right line of the right file.
    original = kernels.paths()[name].read_text().splitlines()
    before, after = text.rsplit('"%s.cu"\n' % name, 1)
    line, after = int(before.rsplit('#line ', 1)[1]), after.splitlines()
    assert after == original[line - 1 :]


def test_options():
    assert kernels.options('e', (('VECTOR', 8),)) == (
        '-std=c++17',
        '-DSTORAGE=__half',
        '-DVECTOR=8',
    )


def test_missing_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, '__file__', str(tmp_path / 'p' / 'cuda' / 'kernels.py'))
    with pytest.raises(
        FileNotFoundError,
        match='kernels: expected the CUDA sources in .*kernels, found neither; reinstall '
        'chainer_bspmm',
    ):
        kernels.directory.__wrapped__()


@pytest.fixture
def compiled(monkeypatch):
    """Stand-ins for CuPy's modules; list of compiled kernels and of the threads that did so."""
    found = []

    def module(code, options):
        (name,) = (option[4:] for option in options if option.startswith('-DX='))
        if name == 'wrong':
            raise ValueError('wrong')
        found.append((name, threading.get_ident()))
        function = types.SimpleNamespace(shared_size_bytes=0, kernel=lambda *_: name)
        return types.SimpleNamespace(get_function=lambda name: function)

    monkeypatch.setattr(kernels, 'device', lambda device_id: types.SimpleNamespace(shared_bytes=1))
    cupy = types.SimpleNamespace(
        RawModule=module,
        cuda=types.SimpleNamespace(Device=lambda device_id: contextlib.nullcontext()),
    )
    monkeypatch.setattr(cuda, 'cupy', cupy)
    forget = kernels._compiled.cache_clear
    forget()
    yield found
    forget()


def loaded(name):
    return kernels.load(0, 'report', 'f', (('X', name),))


def test_compiled_together(compiled):
    with kernels.compiled_together():
        for name in 'abcabc':
            assert loaded(name)((1, 1, 1), (1, 1, 1), (), shared_mem=8) is None
    names, threads = zip(*compiled)
    assert sorted(names) == ['a', 'b', 'c'] and threading.get_ident() not in threads
    for name in 'abcd':
        assert loaded(name)() == name
    assert [name for name, _ in compiled[3:]] == ['d']


def test_other_threads_launch_meanwhile(compiled):
    with kernels.compiled_together(), concurrent.futures.ThreadPoolExecutor(1) as other:
        assert loaded('a')() is None
        assert other.submit(lambda: loaded('b')()).result() == 'b'


def test_what_fails_to_compile(compiled):
    with pytest.raises(KeyError), kernels.compiled_together():
        loaded('wrong')
        loaded('a')
        raise KeyError
    assert [name for name, _ in compiled] == ['a']
    with pytest.raises(ValueError, match='wrong'):
        loaded('wrong')
    assert loaded('a')() == 'a'


def test_an_interrupt_waits_for_no_queue(compiled, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*key):
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(kernels, '_compiled', slowly)
    with pytest.raises(KeyboardInterrupt), kernels.compiled_together():
        pool = kernels._local.together[0]
        for i in range(100):
            loaded(str(i))
        begun.wait(60)
        threading.Timer(0.1, go_on.set).start()
        raise KeyboardInterrupt
    assert kernels._local.together is None and pool._work_queue.qsize() <= pool._max_workers


@pytest.mark.gpu
def test_compiled_once():
    key = cuda.Device().id, 'bspmm_swa', 'f', (('VECTOR', 1), ('SUBWARP', 8), ('WEIGHTS', 0))
    assert kernels.load(*key) is kernels.load(*key)
