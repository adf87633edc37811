"""`run_forked`: results, errors and deaths of the copy, and its effects on this process."""

import atexit
import gc
import itertools
import logging
import mmap
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time
import types
import warnings

import numpy
import pytest

from chainer_bspmm.training import forked
from chainer_bspmm.training.forked import cannot_fork, Failed, NoResult, run_forked
from tests.support.processes import forked_processes, is_gone

pytestmark = pytest.mark.skipif(bool(cannot_fork()), reason='processes are not forked here')


@pytest.fixture
def pids(monkeypatch):
    """List of the ids of processes that the test has forked."""
    return forked_processes(monkeypatch)


def raising(error):
    def function():
        raise error

    return function


# Results and errors.


def test_a_result():
    x = numpy.arange(2**20)
    numpy.testing.assert_array_equal(run_forked(lambda: x[::-1]), x[::-1])


@pytest.mark.parametrize(
    'error, text',
    [
        (ValueError('one line\nand another'), 'ValueError: one line'),
        (SystemExit(3), 'SystemExit: 3'),
        (KeyboardInterrupt(), 'KeyboardInterrupt: '),
    ],
    ids=repr,
)
def test_an_error_of_the_function(error, text):
    with pytest.raises(Failed) as raised:
        run_forked(raising(error))
    assert str(raised.value) == text


def test_a_result_that_cannot_be_pickled():
    with pytest.raises(Failed, match='pickle'):
        run_forked(lambda: threading.Lock())


@pytest.mark.parametrize(
    'die, how',
    [
        (lambda: os._exit(7), 'exit status 7'),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 'Killed'),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 'Interrupt'),  # Ctrl-C ends it
    ],
)
def test_a_copy_that_dies(die, how, pids):
    with pytest.raises(NoResult) as raised:
        run_forked(die)
    assert str(raised.value) == 'a forked process ended without a result (%s)' % how
    assert is_gone(*pids)


def test_a_copy_that_takes_too_long(pids):
    with pytest.raises(NoResult) as raised:
        run_forked(lambda: time.sleep(60), seconds=0.1)
    assert str(raised.value) == 'a forked process gave no result within 0.1 seconds'
    assert is_gone(*pids)


def test_a_copy_that_works_for_long(monkeypatch):
    monkeypatch.setattr(forked, 'IDLE', 0.5)

    def work():
        end = time.process_time() + 1.2
        while time.process_time() < end:
            pass
        return 3

    assert run_forked(work) == 3


def test_a_lock_that_another_thread_holds(monkeypatch):
    """The copy lacks the thread that holds the lock, so the lock is never released there."""
    monkeypatch.setattr(forked, 'IDLE', 0.1)
    lock, is_done = threading.Lock(), threading.Event()
    taken = threading.Event()

    def hold():
        with lock:
            taken.set()
            is_done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        with pytest.raises(NoResult) as raised:
            run_forked(lock.acquire)
    finally:
        is_done.set()
        thread.join()
    expected = 'a forked process waits for something, such as a thread that it lacks'
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    'module, name', [(os, 'fork'), (multiprocessing.connection, 'Pipe')], ids=['fork', 'pipe']
)
def test_no_process_can_be_forked(monkeypatch, module, name):
    def refuse(**_):
        raise OSError(12, 'no memory')

    monkeypatch.setattr(module, name, refuse)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(NoResult) as raised:
        run_forked(int)
    assert str(raised.value) == 'no process can be started: [Errno 12] no memory'
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_platform_without_forks(monkeypatch):
    monkeypatch.setattr(forked, 'CAN_FORK', False)
    with pytest.raises(NoResult) as raised:
        run_forked(int)
    assert str(raised.value) == 'processes cannot be forked on %s' % sys.platform


@pytest.mark.parametrize('is_initialized', [True, False])
def test_a_process_that_uses_mpi(monkeypatch, is_initialized):
    mpi = types.ModuleType('mpi4py.MPI')
    vars(mpi).update(Is_initialized=lambda: is_initialized, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, 'mpi4py.MPI', mpi)
    expected = 'a process that uses MPI must not be forked' if is_initialized else ''
    assert cannot_fork() == expected


# Effects of forking on this process.


def test_ctrl_c_ends_the_copy(pids):
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        run_forked(lambda: time.sleep(60))
    assert is_gone(*pids)


@pytest.mark.parametrize('handler', [signal.SIG_IGN, lambda *_: os.waitpid(-1, os.WNOHANG)])
def test_a_user_who_waits_for_all_children(handler):
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        assert run_forked(lambda: 3) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_thread_that_is_not_the_main_one():
    found = []
    thread = threading.Thread(target=lambda: found.append(run_forked(lambda: 3)))
    thread.start()
    thread.join()
    assert found == [3]


def test_no_warning_of_threads():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            assert run_forked(lambda: 3) == 3
    finally:
        stop.set()
        thread.join()


def test_warnings_that_were_shown_once_are_not_shown_again():
    def warn():
        warnings.warn('the same line', stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('default')
        before = list(warnings.filters)
        warn()
        run_forked(int)
        warn()
        assert warnings.filters == before
    assert len(caught) == 1


def test_no_file_stays_open():
    before = os.listdir('/proc/self/fd')
    run_forked(int)
    with pytest.raises(Failed):
        run_forked(raising(ValueError()))
    assert os.listdir('/proc/self/fd') == before


# State that the copy cannot change, and output that it does not show.


def test_state_in_memory():
    numbers = itertools.count()
    masked = numpy.ma.masked_array([1.0, 2.0], [False, True])

    def change():
        masked[0] = next(numbers) + 7
        return masked.sum()

    assert run_forked(change) == run_forked(change) == 7
    assert next(numbers) == 0 and masked[0] == 1


def test_memory_that_is_shared(tmp_path):
    numpy.save(tmp_path / 'array.npy', numpy.zeros(3000))
    file = numpy.load(tmp_path / 'array.npy', mmap_mode='r+')
    value = multiprocessing.Value('i', 3)
    memory = mmap.mmap(-1, 4096)
    memory[0] = 5

    def change():
        file[:] += 1
        memory[0] += 1
        with value.get_lock():
            value.value += 1
        found = float(file.sum()), memory[0], value.value
        return found, 'shared' if is_shared() else 'private'

    def is_shared():
        with open('/proc/self/maps') as maps:
            return any(line.split()[1] == 'rw-s' for line in maps)

    assert is_shared()
    assert run_forked(change) == ((3000, 6, 4), 'private')
    assert (file.sum(), memory[0], value.value) == (0, 5, 3)
    with value.get_lock():
        assert not numpy.load(tmp_path / 'array.npy').any()


def test_random_numbers():
    def draw():
        return random.random(), numpy.random.random()

    assert run_forked(draw) == run_forked(draw) == draw()


def test_files_that_are_open(tmp_path):
    path = tmp_path / 'file'
    with open(path, 'w') as written, open(path, 'r+') as updated, open(path) as read:
        written.write('before\n')
        written.flush()

        def use():
            written.write('x' * 10**6)
            written.flush()
            updated.write('x')
            found = []
            for use in (updated.flush, read.readline):
                with pytest.raises(OSError, match='Bad file descriptor'):
                    use()
                found.append(use.__name__)
            return found

        assert run_forked(use) == ['flush', 'readline']
        assert read.readline() == 'before\n'
        written.write('after\n')
    assert path.read_text() == 'before\nafter\n'


def test_files_that_are_opened_later_do_not_get_the_text_of_others(tmp_path):
    with open(tmp_path / 'old', 'w+') as old:
        number = old.fileno()

        def use():
            with open(tmp_path / 'new', 'w') as new:
                old.write('x' * 10**6)
                assert new.fileno() != number

        with pytest.raises(Failed, match='Bad file descriptor'):
            run_forked(use)
    assert (tmp_path / 'new').read_text() == (tmp_path / 'old').read_text() == ''


def test_a_pipe(capfd):
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        with pytest.raises(Failed):
            run_forked(lambda: theirs.send('from the copy'))
        assert not ours.poll()


def test_output(capfd):
    def say():
        print('print')
        print('stderr', file=sys.stderr)
        os.write(1, b'descriptor')
        os.system('echo another process')
        logging.getLogger().error('logging')
        warnings.warn('warning', stacklevel=1)
        return sys.stdin.read()

    assert run_forked(say) == ''
    assert capfd.readouterr() == ('', '')


def test_handlers_of_logging():
    records = []

    class Keeping(logging.Handler):
        def emit(self, record):
            records.append(record)

    logger = logging.getLogger('tests.test_forked')
    handler = Keeping()
    logger.addHandler(handler)
    try:
        assert run_forked(lambda: logger.error('x') or len(records)) == 0
    finally:
        logger.removeHandler(handler)


def test_functions_at_exit(tmp_path):
    path = tmp_path / 'file'
    atexit.register(path.write_text, 'x')
    try:
        run_forked(int)
        with pytest.raises(Failed):
            run_forked(sys.exit)
    finally:
        atexit.unregister(path.write_text)
    assert not path.exists()


def test_no_garbage_is_collected():
    assert gc.isenabled() and not run_forked(gc.isenabled)
