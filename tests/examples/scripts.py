"""Running the scripts of examples/ as a user runs them."""
import csv
import importlib
import os
from pathlib import Path
import subprocess
import sys

import numpy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / 'examples'


def command(script, arguments):
    return [sys.executable, str(script)] + [str(argument) for argument in arguments]


def environment():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    return dict(os.environ, PYTHONPATH=path, OPENBLAS_NUM_THREADS='1')


def run(script, *arguments, status=0, cwd=None):
    """Run a script; return its stdout, or its stderr where it must fail."""
    done = subprocess.run(command(script, arguments), cwd=cwd, env=environment(),
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


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
