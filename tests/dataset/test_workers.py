"""Worker processes: answers, inherited state, and ends."""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time

import pytest

from chainer_bspmm.dataset import workers
from chainer_bspmm.dataset.workers import CannotStart, Died, Process, Workers
from tests.support.processes import is_gone, python

pytestmark = pytest.mark.skipif(not workers.CAN_FORK, reason='processes are not forked here')


def double(x):
    return 2 * x


def obey(order):
    """Answer an order of a test, or die in the way that it names."""
    if order == 'crash':
        ctypes.string_at(0)
    elif order == 'hang up':
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, processes ignore it
        os.kill(os.getpid(), signal.SIGHUP)
    elif order == 'exit':
        os._exit(7)
    elif order == 'raise':
        raise LookupError('no such thing')
    elif order == 'sleep':
        time.sleep(60)
    return order


@pytest.fixture
def start():
    """Function that starts a `Process`, which ends with the test."""
    started = []

    def start_one(function):
        started.append(Process(function))
        return started[-1]

    yield start_one
    for process in started:
        process.close()


@pytest.fixture
def two():
    """Two workers that run `obey`."""
    pool = Workers(obey, 2)
    yield pool
    pool.close()


def test_answers_come_in_turn(start):
    process = start(double)
    assert [process.ask(i) for i in range(3)] == [0, 2, 4]


def test_large_requests_and_answers(start):
    assert start(double).ask('x' * 10**7) == 'x' * (2 * 10**7)


def test_functions_without_a_name_reach_the_process(start):
    offset = 5
    assert start(lambda x: x + offset).ask(1) == 6


def test_an_error_is_raised_and_the_process_stays(start):
    process = start(obey)
    with pytest.raises(LookupError, match='^no such thing$'):
        process.ask('raise')
    assert process.ask('again') == 'again'


@pytest.mark.parametrize(
    'order, text',
    # SIGHUP is signal 1, so its wait status is next to that of a normal exit.
    [('crash', 'Segmentation fault'), ('hang up', 'Hangup'), ('exit', 'exit status 7')],
)
def test_a_process_that_dies(start, order, text):
    process = start(obey)
    with pytest.raises(Died, match='^%s$' % text):
        process.ask(order)
    assert process.is_closed


def test_a_crash_prints_nothing(start, capfd):
    """Nothing is printed although tests run with faulthandler, as programs may."""
    assert faulthandler.is_enabled()
    with pytest.raises(Died):
        start(obey).ask('crash')
    assert capfd.readouterr() == ('', '')


def test_a_process_that_another_part_of_the_program_waited_for(start):
    process = start(obey)
    os.kill(process._pid, signal.SIGKILL)
    os.waitpid(process._pid, 0)
    with pytest.raises(Died, match='^its exit status is unknown$'):
        process.ask('anything')


def test_handlers_of_signals_are_the_callers(start):
    called = []
    previous = signal.signal(signal.SIGTERM, lambda *args: called.append(os.getpid()))
    try:
        process = start(lambda request: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, previous)
    with pytest.raises(Died, match='^Terminated$'):
        process.ask(None)


def test_an_interrupt_is_the_callers(start):
    process = start(lambda request: os.kill(os.getpid(), signal.SIGINT))
    assert process.ask(None) is None


def test_signals_of_the_caller_are_delivered_again(start):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    start(double)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_from_a_thread(start):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(start(double).ask(4)))
    thread.start()
    thread.join()
    assert answers == [8]


def test_a_fork_of_the_caller_ends_no_process(start):
    """A forked process, as of multiprocessing, may collect a generator that owns a `Process`."""
    process = start(double)
    pid = os.fork()
    if not pid:
        process.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert process.ask(2) == 4


def test_requests_are_shared(two):
    futures = [two.submit(i) for i in range(50)]
    assert [two.result(future) for future in futures] == list(range(50))


def test_another_takes_the_place_of_one_that_died(two):
    for _ in range(3):
        futures = [two.submit('crash') for _ in range(2)]
        for future in futures:
            with pytest.raises(Died, match='^Segmentation fault$'):
                two.result(future)
    assert len(two._threads) == 2
    assert two.result(two.submit(5)) == 5


def test_a_request_that_cannot_be_sent(two):
    with pytest.raises(TypeError, match="^cannot pickle 'generator' object$"):
        two.result(two.submit(i for i in range(3)))
    assert two.result(two.submit(5)) == 5


def test_closing_does_not_wait_for_answers():
    pool = Workers(obey, 2)
    pids = [process._pid for process in pool._threads]
    for _ in range(5):
        pool.submit('sleep')
    time.sleep(0.1)
    start = time.perf_counter()
    pool.close()
    assert time.perf_counter() - start < 30
    assert all(map(is_gone, pids))


def refuse(*args):
    raise BlockingIOError(11, 'Resource temporarily unavailable')


CANNOT = r'^\[Errno 11\] Resource temporarily unavailable$'


def test_no_process_may_be_started(monkeypatch):
    monkeypatch.setattr(os, 'fork', refuse)
    with pytest.raises(CannotStart, match=CANNOT):
        Workers(double, 2)


def test_no_files_are_left(monkeypatch):
    monkeypatch.setattr(workers.multiprocessing.connection, 'Pipe', refuse)
    with pytest.raises(CannotStart, match=CANNOT):
        Workers(double, 2)


def test_no_thread_can_be_started(monkeypatch):
    def refuse_thread(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, 'start', refuse_thread)
    with pytest.raises(CannotStart, match="^can't start new thread$"):
        Workers(double, 2)


def test_a_platform_without_forks(monkeypatch):
    monkeypatch.setattr(workers, 'CAN_FORK', False)
    with pytest.raises(CannotStart, match='^processes cannot be forked on %s$' % sys.platform):
        Process(double)


def test_fewer_processes_will_do(monkeypatch):
    fork = os.fork
    allowed = [fork, refuse]
    monkeypatch.setattr(os, 'fork', lambda: allowed.pop(0)())
    pool = Workers(double, 3)
    assert len(pool._threads) == 1
    assert pool.result(pool.submit(3)) == 6
    pool.close()


def test_an_interrupt_during_the_start_leaves_no_process(monkeypatch):
    fork = os.fork
    pids = []

    def interrupted():
        if pids:
            raise KeyboardInterrupt
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, 'fork', interrupted)
    with pytest.raises(KeyboardInterrupt):
        Workers(double, 2)
    assert all(map(is_gone, pids))


def test_one_that_is_left_answers_alone(two, monkeypatch):
    monkeypatch.setattr(os, 'fork', refuse)
    with pytest.raises(Died):
        two.result(two.submit('crash'))
    assert two.result(two.submit(5)) == 5
    with pytest.raises(CannotStart, match=CANNOT):
        two.result(two.submit('crash'))


KILLED = """
import os, signal, time
from chainer_bspmm.dataset.workers import Workers
pool = Workers(lambda request: os.getpid(), 2)
pids = {pool.result(pool.submit(None)) for _ in range(50)}
print(*(process._pid for process in pool._threads), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_with_a_killed_parent():
    pids = list(map(int, python('-c', KILLED, status=-signal.SIGKILL).stdout.split()))
    assert len(pids) == 2
    end = time.monotonic() + 30
    while not all(map(is_gone, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(map(is_gone, pids))
