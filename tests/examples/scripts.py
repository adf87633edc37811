"""Run the scripts of examples/ as a user does."""

import csv
import importlib
import multiprocessing
import os
from pathlib import Path
import runpy
import subprocess
import sys
import tempfile
from unittest import mock

import numpy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / 'examples'


def command(script, arguments):
    return [sys.executable, str(script)] + [str(argument) for argument in arguments]


def environment():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    return dict(os.environ, PYTHONPATH=path, OPENBLAS_NUM_THREADS='1')


def run(script, *arguments, status=0, cwd=None, stdin=None):
    """Run a script, `stdin` a file for it; return its stdout, or its stderr where it must fail."""
    done = subprocess.run(
        command(script, arguments),
        cwd=cwd,
        env=environment(),
        stdin=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


# Its children start with the imports that take an example two seconds.
SERVER = multiprocessing.get_context('forkserver')
SERVER.set_forkserver_preload(
    [
        'chainer_bspmm',
        'chainer_chemistry.models',
        'matplotlib.pyplot',
        'pandas',
        'rdkit.Chem',
        'sklearn.metrics',
    ]
)


def run_at_once(script, *arguments, status=0, cwd=None):
    """Act as `run` in a process that has the large packages imported already."""
    # The server starts with the first process; all of them have its environment.
    with mock.patch.dict(os.environ, environment()), tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ('stdout', 'stderr')]
        process = SERVER.Process(target=_main, args=(command(script, arguments)[1:], cwd, *paths))
        process.start()
        process.join(300)
        process.kill()
        process.join()
        out, err = [Path(path).read_text() for path in paths]
    assert process.exitcode == status, out + err
    return err if status else out


def _main(argv, cwd, stdout, stderr):
    for stream, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    if cwd is not None:
        os.chdir(cwd)
    sys.argv[:] = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    runpy.run_path(argv[0], run_name='__main__')


def arrays(path):
    with numpy.load(path, allow_pickle=True) as f:
        return {name: f[name] for name in f}


def rows(path):
    with open(path, newline='') as f:
        return list(csv.DictReader(f))


def imported(folder, name):
    """Import a module of an example; the module itself finds examples/common."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
