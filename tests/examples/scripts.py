"""Run the scripts of examples/ as a user does."""

import csv
import importlib
import os
from pathlib import Path
import subprocess
import sys
import tempfile
from unittest import mock

import numpy

from benchmarks.training.example_runs import environment
from benchmarks.training.example_runs import run_preloaded

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / 'examples'


def command(script, arguments):
    return [sys.executable, str(script)] + [str(argument) for argument in arguments]


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


def run_at_once(script, *arguments, status=0, cwd=None):
    """Act as `run` in a process that has the large packages imported already."""
    # The server starts with the first process; all of them have its environment.
    with mock.patch.dict(os.environ, environment()), tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ('stdout', 'stderr')]
        exit_status = run_preloaded(command(script, arguments)[1:], *paths, cwd=cwd, timeout=300)
        out, err = [Path(path).read_text() for path in paths]
    assert exit_status == status, out + err
    return err if status else out


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
