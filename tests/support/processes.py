"""Separate processes, in which tests may change anything."""

import collections
import json
import os
import pathlib
import select
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

Done = collections.namedtuple('Done', 'returncode stdout stderr')

# A process that imports modules once and forks for every program. A fork leaves the loop, so its
# program runs and ends at the top level, like one of `python -c`.
_SERVER = """
import importlib, json, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import gc
gc.freeze()  # else a fork spends most of its time in clearing away what was imported
del gc, importlib
while True:
    request = sys.stdin.readline()
    if not request:
        os._exit(0)
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
request = json.loads(request)
os.chdir(request['cwd'])
for number, name in enumerate(('/dev/null', request['stdout'], request['stderr'])):
    file = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY)
    os.dup2(file, number)
    os.close(file)
sys.path[0] = os.getcwd()
sys.argv = request['argv']
code = compile(request['code'], '<string>', 'exec')
for name in ('json', 'os', 'sys', 'name', 'pid', 'number', 'file', 'request'):
    del globals()[name]
exec(code)
"""


def environment():
    """Return an environment in which this checkout is imported, and libraries have one thread."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    return dict(os.environ, PYTHONPATH=path, OPENBLAS_NUM_THREADS='1')


def python(*words, cwd=None, status=0):
    """Run ``python WORDS`` in a new process that imports this checkout; status None: any."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


class Forks:
    """Run programs in forks of one process that has imported some modules.

    A program starts fast because these modules are imported already. Earlier programs have no
    effect on it.
    """

    def __init__(self, folder, *modules):
        self._files = [str(folder / name) for name in ('stdout', 'stderr')]
        self._process = subprocess.Popen(
            [sys.executable, '-c', _SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def run(self, code, argv=('-c',), cwd='.'):
        """Run the text of a program; return its status and output (Done)."""
        for file in self._files:
            open(file, 'w').close()
        request = dict(code=code, argv=[str(word) for word in argv], cwd=str(cwd))
        request.update(zip(('stdout', 'stderr'), self._files))
        print(json.dumps(request), file=self._process.stdin, flush=True)
        assert select.select([self._process.stdout], [], [], 300)[0], 'still running after 300 s'
        status = int(self._process.stdout.readline())
        return Done(status, *(pathlib.Path(file).read_text() for file in self._files))

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def is_gone(pid):
    """Return whether a process has ended and was waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def forked_processes(monkeypatch):
    """Return a list that gets the pid of every process that this one forks."""
    fork = os.fork
    pids = []

    def recorded():
        pid = fork()
        pids.append(pid)
        return pid

    monkeypatch.setattr(os, 'fork', recorded)
    return pids
