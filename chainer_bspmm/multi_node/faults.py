"""Faults: an error of one rank ends all ranks, with one message.

MPI does not notice a Python process that fails. The other ranks wait for it forever, and so does
the process itself when it exits.
"""

import atexit
import os
import socket
import sys
import time

PATIENCE = 20  # seconds that a rank waits to be ended by the one that fails


def raise_on(comm, rank, error):
    """Raise an error on `rank`; all ranks call this, and the others wait to be ended by it."""
    if comm.rank != rank:
        time.sleep(PATIENCE)
    raise error


_process = None  # id of the process in which end_all_on_error was installed


def end_all_on_error():
    """Let an uncaught exception, and ``sys.exit`` with an error, end all ranks of this MPI run.

    The traceback comes first, then a line with rank, host and error.
    """
    global _process
    if _process == os.getpid():
        return
    _process = os.getpid()  # a child process that fails ends alone
    show, leave = sys.excepthook, sys.exit
    if show.__module__ == 'chainermn.global_except_hook':  # this hook would end the ranks itself
        show = sys.__excepthook__
    failed = []

    def hook(kind, value, traceback):
        _wait_for_lower_ranks()
        show(kind, value, traceback)
        _abort('%s: %s' % (kind.__name__, value))

    def leaves(status=None):
        failed[:] = [status] if status else []
        if status:
            _wait_for_lower_ranks()  # before Python prints the message of the exit
        leave(status)

    def at_exit():
        if failed:
            _abort('exit status %s' % (failed[0] if isinstance(failed[0], int) else 1))

    sys.excepthook, sys.exit = hook, leaves
    # `at_exit` runs before MPI is finalized, where this rank would wait for the others.
    atexit.register(at_exit)


def _world():
    """Return the communicator of all ranks, or None if they cannot be ended from here."""
    from mpi4py import MPI

    if os.getpid() != _process or MPI.Is_finalized():
        return None
    return MPI.COMM_WORLD


def _wait_for_lower_ranks():
    """Wait a little, so that an error of all ranks is shown only by the first, which ends them."""
    comm = _world()
    if comm is not None and comm.rank:
        time.sleep(1 + min(comm.rank, 20) / 10)


def _abort(cause):
    comm = _world()
    if comm is None:
        return
    sys.stdout.flush()
    sys.stderr.write(
        'chainer_bspmm: rank %d of %d on %s (process %d) has failed, all ranks end: %s\n'
        % (comm.rank, comm.size, socket.gethostname(), os.getpid(), cause)
    )
    sys.stderr.flush()
    comm.Abort(1)
