"""Fixtures of all tests: array modules, emulated GPUs, poisoned memory; a limit of time."""

import faulthandler
import gc
import os
import signal

# The processes of pytest-xdist share the cores, which NumPy must know when it is imported.
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
from tests.support.processes import Forks


# Most tests compare with Chainer's own classes, so these are not adopted. Tests of the adoption,
# such as tests/training/test_two_lines.py, turn it on.
vars(chainer.global_config)['bspmm_capture'] = False


SECONDS = 60  # limit of a test; ten times as many for slow tests, and on a GPU, which compiles
SECONDS_TO_FAIL = 10  # more seconds until the process is ended

_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    """Keep standard error, and let Ctrl-C interrupt tests and the processes that they start.

    In a test pytest captures standard error, and loses it if the process ends. If a shell script
    runs the tests in the background, Ctrl-C is ignored.
    """
    config.stash[_stderr] = os.dup(2)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Let collections of garbage, in tests and their forks, pass over modules and tests.

    There are a million of such objects. To make them leaves hardly any garbage.
    """
    gc.disable()
    yield
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Fail a test that hangs, and end the process if the test never returns to Python.

    The process first prints the traceback.
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
    """Keep parsed SMILES out of the user's cache, also in processes that a test starts."""
    os.environ[cache.VARIABLE] = str(tmp_path_factory.mktemp('cache'))


@pytest.fixture(scope='module')
def forks(tmp_path_factory):
    """`Forks` of a process that has imported the package; a test module may have its own.

    It ends with the module, because other tests wait for all child processes.
    """
    forks = Forks(
        tmp_path_factory.mktemp('forks'), 'chainer_bspmm.info', 'chainer_bspmm.run_script'
    )
    yield forks
    forks.close()


@pytest.fixture(params=['numpy', pytest.param('cupy', marks=pytest.mark.gpu)])
def xp(request, monkeypatch):
    """Array module: numpy, or, on a GPU, cupy, whose new arrays are filled with NaN."""
    if request.param == 'numpy':
        return numpy
    poisoned(monkeypatch, cuda.cupy)
    return cuda.cupy


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch):
    """Place where kernels run: emulated (in slow tests also under AddressSanitizer), or a GPU."""
    return place_of(request.param, monkeypatch)


@pytest.fixture(params=['numpy', *GPUS])
def place(request, monkeypatch):
    """Place where operations run: the host, or one of the places of `gpu`."""
    return place_of(request.param, monkeypatch)


@pytest.fixture(params=['numpy', pytest.param('cupy', marks=pytest.mark.gpu)])
def device(request):
    """Chainer's device: the host, or a GPU, if there is one."""
    return chainer.get_device('@numpy' if request.param == 'numpy' else '@cupy:0')


def pytest_collection_modifyitems(config, items):
    """Skip tests marked gpu if there is no GPU, and tests marked multi_gpu if there is one.

    Of the cases of a test that need a missing GPU, one is skipped, so that it is listed. The others
    are left out, because thousands of skips would take as long as a tenth of the tests.
    """
    n_gpus, _ = info.count_gpus()
    if not n_gpus:
        _leave_out_cases_for_a_gpu(config, items)
    for item in items:
        if item.get_closest_marker('multi_gpu') and n_gpus == 1:
            item.add_marker(pytest.mark.skip(reason='needs two GPUs, found one'))


def _leave_out_cases_for_a_gpu(config, items):
    """Skip the first quick and the first slow case for a GPU of every test; remove the others."""
    first = {}
    left_out = []
    for item in items:
        if item.get_closest_marker('gpu'):
            is_slow = item.get_closest_marker('slow') is not None
            name, _, _ = item.nodeid.partition('[')
            if first.setdefault((name, is_slow), item) is not item:
                left_out.append(item)
    for item in first.values():
        item.add_marker(pytest.mark.skip(reason='no GPU: CuPy is not installed or finds no device'))
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)
