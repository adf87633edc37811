"""What all tests share: array modules, emulated GPUs, poisoned GPU memory, and an end in time."""

import faulthandler
import os
import signal

# Before NumPy is imported: the processes of pytest-xdist share the cores.
if 'PYTEST_XDIST_WORKER' in os.environ:
    os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1')

import numpy
import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer
from chainer.backends import cuda

from chainer_bspmm import info
from chainer_bspmm.dataset import cache
from tests.support import poisoned
from tests.support.devices import GPUS, place_of


# Chainer's own classes are what most tests compare with; tests/training/test_two_lines.py adopts.
vars(chainer.global_config)['bspmm_capture'] = False


SECONDS = 60  # of a test; slow ones, and those on a GPU, which compile, have ten times as many
SECONDS_TO_FAIL = 10  # after these, before its process is ended

_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    """Keep the file of errors: that of a test is captured, and lost with the process."""
    config.stash[_stderr] = os.dup(2)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Let a test that hangs fail; one that never returns to Python ends the process.

    Then the traceback is printed.
    """
    is_long = item.get_closest_marker('slow') or item.get_closest_marker('gpu')
    seconds = SECONDS * (10 if is_long else 1)

    def fail(*_):
        pytest.fail('the test has not ended after %d seconds' % seconds)

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(
        seconds + SECONDS_TO_FAIL, exit=True, file=item.config.stash[_stderr]
    )
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True, scope='session')
def cache_of_the_tests(tmp_path_factory):
    """Keep parsed SMILES, also those of processes that tests start, out of the user's cache."""
    os.environ[cache.VARIABLE] = str(tmp_path_factory.mktemp('cache'))


@pytest.fixture(params=['numpy', pytest.param('cupy', marks=pytest.mark.gpu)])
def xp(request, monkeypatch):
    """numpy, and cupy with every new array full of NaN; the latter is skipped without a GPU."""
    if request.param == 'numpy':
        return numpy
    poisoned(monkeypatch, cuda.cupy)
    return cuda.cupy


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch):
    """Where kernels run: emulated (slow: under AddressSanitizer as well), or on a GPU."""
    return place_of(request.param, monkeypatch)


@pytest.fixture(params=['numpy', *GPUS])
def place(request, monkeypatch):
    """The same, and the host."""
    return place_of(request.param, monkeypatch)


@pytest.fixture(params=['numpy', pytest.param('cupy', marks=pytest.mark.gpu)])
def device(request):
    """A Chainer device: the host, or a GPU; the latter is skipped without one."""
    return chainer.get_device('@numpy' if request.param == 'numpy' else '@cupy:0')


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu if there is no GPU, and those marked multi_gpu if there is only one."""
    n_gpus, _ = info.count_gpus()
    for item in items:
        if item.get_closest_marker('gpu') and not n_gpus:
            item.add_marker(
                pytest.mark.skip(reason='no GPU: CuPy is not installed or finds no device')
            )
        elif item.get_closest_marker('multi_gpu') and n_gpus == 1:
            item.add_marker(pytest.mark.skip(reason='needs two GPUs, found one'))
