"""Worker processes that need nothing but a fork.

Workers of multiprocessing need semaphores, a parent that may have children, and, where they are not
forked, a script with a main guard. These need none of that, whatever the start method.
"""

import concurrent.futures
import contextlib
import faulthandler
import gc
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading

# The system libraries of macOS do not survive a fork, and Windows has none.
CAN_FORK = hasattr(os, 'fork') and sys.platform != 'darwin'

_starting = threading.Lock()


class CannotStart(RuntimeError):
    """No process can be started, on this system or at this moment."""


class Died(Exception):
    """The process died before it answered; the text says how it ended."""


class Process:
    """A forked process that answers ``function(request)`` to one request after the other."""

    def __init__(self, function):
        """Start the process; raises CannotStart."""
        if not CAN_FORK:
            raise CannotStart('processes cannot be forked on %s' % sys.platform)
        self._owner = os.getpid()
        # Processes are started one at a time: a process that another thread forks meanwhile would
        # inherit `theirs` and keep it open, so that the end of this one would go unnoticed.
        with _starting:
            try:
                self._connection, theirs = multiprocessing.connection.Pipe()
            except OSError as error:
                raise CannotStart(str(error)) from error
            # No handler of the caller's signals may run in the new process.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._pid = os.fork()
                if not self._pid:
                    _serve(self._connection, theirs, function)
            except (OSError, RuntimeError) as error:  # RuntimeError: Python is about to exit
                self._connection.close()
                raise CannotStart(str(error)) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                theirs.close()

    @property
    def is_closed(self):
        """Whether the process has ended."""
        return self._pid is None

    def ask(self, request):
        """Return the answer, or raise what the function raised; Died: the process has died."""
        has_died = False
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError):
            has_died = True
        # Died is not raised in the `except` block, because it would then refer to that error, which
        # keeps the pipe's buffers alive.
        if has_died:
            raise Died(self.close())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self):
        """Kill the process, so that :meth:`ask` raises Died; do nothing in a fork of its owner."""
        pid = self._pid
        if pid is not None and os.getpid() == self._owner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self):
        """End the process, close its connection, and return how it ended (str)."""
        self.kill()
        pid = self._pid
        self._pid = None
        self._connection.close()
        if pid is None or os.getpid() != self._owner:
            return ''
        return wait_for(pid)


def wait_for(pid):
    """Wait for the end of a process that was forked, and return how it ended (str)."""
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # another part of the program has waited for all children
        return 'its exit status is unknown'
    return 'exit status %d' % status if status >= 0 else signal.strsignal(-status)


def _serve(parents, connection, function):
    """Answer requests until the connection is closed, then end this process."""
    try:
        parents.close()
        gc.freeze()  # CUDA objects of the parent must not be collected here
        faulthandler.disable()  # the parent reports how this process ended
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        while True:
            request = connection.recv()
            try:
                answer = function(request)
            except Exception as error:
                answer = error
            connection.send(answer)
    finally:  # the parent has closed its end, or is gone
        os._exit(1)


class Workers:
    """Processes that share requests, each with a thread that waits for its answers."""

    def __init__(self, function, n_processes):
        """Start as many processes as possible, up to `n_processes`; CannotStart: none started."""
        self._function = function
        self._requests = queue.SimpleQueue()
        self._threads = {}  # Process -> its thread
        try:
            for _ in range(n_processes):
                self._start()
        except CannotStart:
            if not self._threads:
                raise
        except BaseException:  # Ctrl-C
            self.close()
            raise

    def _start(self):
        # The fork is made here rather than in the thread, whose stack may be small.
        process = Process(self._function)
        thread = threading.Thread(target=self._pass_on, args=(process,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            process.close()
            raise CannotStart(str(error)) from error
        self._threads[process] = thread

    def _pass_on(self, process):
        """Pass requests on to a process, until it has died or there are no more."""
        while (waiting := self._requests.get()) is not None:
            request, future = waiting
            try:
                future.set_result(process.ask(request))
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, Died):
                    return

    def submit(self, request):
        """Return a Future of the answer, to be passed to :meth:`result`."""
        future = concurrent.futures.Future()
        self._requests.put((request, future))
        return future

    def result(self, future):
        """Return an answer; Died: the process died, and another has taken its place.

        Raises what the function raised; CannotStart: no process is left.
        """
        try:
            return future.result()
        except Died:
            for process in [process for process in self._threads if process.is_closed]:
                del self._threads[process]
                try:
                    self._start()
                except CannotStart:
                    if not self._threads:
                        raise
            raise

    def close(self):
        """End the processes."""
        for process in self._threads:
            process.kill()
            self._requests.put(None)
        for process, thread in self._threads.items():
            thread.join()
            process.close()
        self._threads = {}
