"""`run_forked`: run a function in a forked copy of this process, and return its result.

Nothing that the function does to variables, attributes, caches, iterators or generators of random
numbers changes this process, whatever code they belong to. So no state has to be found and undone.
"""

import contextlib
import ctypes
import gc
import logging
import mmap
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from chainer_bspmm.dataset.workers import CAN_FORK, wait_for

SECONDS = 60.0  # to wait for a result
IDLE = 5.0  # seconds without a result and without work, after which no result is expected


class Failed(Exception):
    """The function raised an error: the message is its class, and the first line of its text."""


class NoResult(Exception):
    """There is no result of the function for another reason: the message is a clause."""


def cannot_fork() -> str:
    """Return the reason (a clause) why this process cannot be forked, or an empty text."""
    if not CAN_FORK or sys.platform != 'linux':  # memory is looked up in Linux's /proc
        return 'processes cannot be forked on %s' % sys.platform
    # MPI registers memory with network cards, which may keep writing to the pages from before.
    mpi: Any = sys.modules.get('mpi4py.MPI')
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return 'a process that uses MPI must not be forked'
    return ''


def run_forked(function: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Run a function in a copy of this process, and return its result, which is pickled there.

    The copy has only this thread. It has no output, shows no warnings and logs nothing. The
    generator of `random` has the same state as here, although Python seeds it anew after a fork.
    Files that are open for writing only are the null device there; other open files, sockets and
    pipes cannot be used. Memory that is shared with other processes, such as a memory-mapped file,
    is a private copy. The copy collects no garbage, and calls no exit functions.

    Whatever `function` opens by itself, such as a file by its path, is not undone.

    Args:
        function (callable): has no arguments.
        seconds (float): time after which the copy is killed.

    Raises:
        Failed: `function` raised something, or its result cannot be pickled.
        NoResult: there cannot be a copy, it has died, it took too long, or it waits for something
            that does not come, such as the work of a thread of this process.
    """
    reason = cannot_fork()
    if reason:
        raise NoResult(reason)
    try:
        ours, theirs = multiprocessing.connection.Pipe(duplex=False)
    except OSError as error:
        raise NoResult('no process can be started: %s' % error) from error
    answer = None
    position = random.getstate()
    # A user's signal handler may only run once this process is able to end the copy.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = None
    with ours:
        try:
            with theirs:
                pid = _fork()
                if not pid:
                    _answer(theirs, function, position, seconds)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            answer = _received(ours, pid, seconds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if pid:
                ending = _end(pid, is_killed=answer is None)
    if not answer:
        raise NoResult('a forked process ended without a result (%s)' % ending)
    has_failed, result = pickle.loads(answer)
    if has_failed:
        raise Failed(result)
    return result


def _fork():
    # Python warns if a process with threads is forked, because the copy lacks them. This uses no
    # `catch_warnings`, after which a user's warnings that were shown once would be shown again.
    filters: Any = warnings.filters
    quiet = 'ignore', None, DeprecationWarning, None, 0
    filters.insert(0, quiet)
    try:
        return os.fork()
    except (OSError, RuntimeError) as error:  # RuntimeError: Python is about to exit
        raise NoResult('no process can be started: %s' % error) from error
    finally:
        filters.remove(quiet)


def _received(connection, pid, seconds):
    """Return the answer (bytes), which is empty if the process has ended without one."""
    end = time.monotonic() + seconds
    worked = None
    while not connection.poll(min(IDLE, seconds)):
        if time.monotonic() >= end:
            raise NoResult('a forked process gave no result within %g seconds' % seconds)
        before = worked
        worked = _processor_time(pid)
        if worked == before:
            raise NoResult('a forked process waits for something, such as a thread that it lacks')
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):  # OSError: the process has ended in the middle of its answer
        return b''


def _processor_time(pid):
    """Return the processor time of a process in the system's units, or None if it is gone."""
    try:
        with open('/proc/%d/stat' % pid) as file:
            after_name = file.read().rpartition(')')[2].split()
    except OSError:
        return None
    return int(after_name[11]) + int(after_name[12])  # in user mode and in the system


def _end(pid, is_killed):
    """Wait for a process, after killing it if `is_killed`, and return how it ended (str)."""
    if is_killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return wait_for(pid)


# In the copy.


def _answer(connection, function, position, seconds):
    """Send the result of the function, or its error, and end this process."""
    try:
        gc.disable()
        random.setstate(position)
        _reset_signals(seconds)
        _leave_files(connection.fileno())
        _leave_shared_memory()
        logging.disable()
        warnings.simplefilter('ignore')
        try:
            answer = pickle.dumps((False, function()))
        except BaseException as error:
            answer = pickle.dumps((True, described(error)))
        connection.send_bytes(answer)
    finally:
        os._exit(1)


def _reset_signals(seconds):
    """Let signals end this process: Ctrl-C's, and a timer's if nothing else does."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.setitimer(signal.ITIMER_REAL, 2 * seconds)


def _leave_files(kept):
    """Replace open files except `kept`, so that this process does not change them.

    Files that are open for writing only become the null device; any use of the others is an error.
    Their numbers stay in use, so that no object that has one writes to a file that is opened later.
    """
    import fcntl  # Windows has none

    null = os.open(os.devnull, os.O_RDWR)
    unusable = os.open(os.devnull, os.O_PATH)  # any use of it is an error
    for name in os.listdir('/proc/self/fd'):
        number = int(name)
        if number in (kept, null, unusable):
            continue
        with contextlib.suppress(OSError):  # the list itself was open, too
            is_written = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            os.dup2(null if is_written or number <= 2 else unusable, number)
    sys.stdin = open(os.devnull)
    sys.stdout = sys.stderr = open(os.devnull, 'w')


def _leave_shared_memory():
    """Replace memory that other processes see by private copies."""
    shared = list(_shared_memory())
    if not shared:
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]

    def put(start, size, flags, file, offset):
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        flags |= mmap.MAP_PRIVATE | _MAP_FIXED
        if library.mmap(start, size, rights, flags, file, offset) != start:
            raise OSError(ctypes.get_errno(), 'memory cannot be copied')

    for start, size, offset, inode, path in shared:
        file = _opened(path, inode)
        if file is not None:  # the system copies the pages that are written to
            put(start, size, 0, file, offset)
        else:
            content = ctypes.string_at(start, size)
            put(start, size, mmap.MAP_ANONYMOUS, -1, 0)
            ctypes.memmove(start, content, size)


_MAP_FIXED = 0x10


def _shared_memory():
    """Yield (start, size, offset, inode, path) of writable memory that is shared.

    The path leads to the mapped file; it is empty without one. Mapped registers of devices are left
    out.
    """
    with open('/proc/self/maps') as file:
        lines = file.read().splitlines()
    for line in lines:
        addresses, rights, offset, _, inode, *paths = line.split(maxsplit=5)
        path = ''.join(paths)
        if path.startswith('/dev/'):
            is_memory = path.startswith(('/dev/shm/', '/dev/zero'))
        else:
            is_memory = not path.startswith('anon_inode:')
        if rights[1] == 'w' and rights[3] == 's' and is_memory:
            start, end = (int(address, 16) for address in addresses.split('-'))
            yield start, end - start, int(offset, 16), int(inode), path


def _opened(path, inode):
    """Return the descriptor of a file, or None if it has been removed or replaced."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    return file if os.fstat(file).st_ino == inode else None


def described(error: BaseException) -> str:
    """Return the class of an error, and the first line of its text."""
    return '%s: %s' % (type(error).__name__, str(error).strip().partition('\n')[0])
