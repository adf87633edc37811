"""Scripts of examples/, run as users run them."""

import contextlib
import csv
import gc
import importlib
import io
import os
from pathlib import Path
import runpy
import subprocess
import sys
from unittest import mock

import chainer
import numpy
from threadpoolctl import threadpool_limits

from tests.support.processes import environment, ROOT

EXAMPLES = ROOT / 'examples'


def command(script, arguments):
    return [sys.executable, str(script)] + [str(argument) for argument in arguments]


def run_here(script, *arguments, status=0, cwd=None):
    """Run a script in this process; return its standard output, or its error if it fails."""
    before = os.getcwd()
    out = io.StringIO()
    argv = command(script, arguments)[1:]
    path = [str(Path(script).parent), *sys.path]
    with (
        mock.patch.multiple(sys, argv=argv, path=path, unraisablehook=None),
        mock.patch.dict(vars(chainer.global_config)),
        # What the process of the tests has frozen stays so.
        mock.patch.multiple(gc, freeze=mock.DEFAULT, unfreeze=mock.DEFAULT),
        contextlib.redirect_stdout(out),
        threadpool_limits(1),  # small products are faster on one thread
    ):
        os.chdir(cwd or before)
        try:
            runpy.run_path(str(script), run_name='__main__')
        except SystemExit as end:
            code = end.code
        finally:
            os.chdir(before)
    assert isinstance(code, str) if status else not code, (code, out.getvalue())
    return code if status else out.getvalue()


def run_apart(script, *arguments, stdout=subprocess.PIPE, variables=None, **options):
    """Run a script in another process, which has its own standard streams; return the process.

    `variables`: of its environment. `options`: of `subprocess.run`.
    """
    return subprocess.run(
        command(script, arguments),
        env={**environment(), **(variables or {})},
        stdout=stdout,
        stderr=subprocess.PIPE,
        **options,
    )


def error_of(script, *arguments, cwd=None):
    """Return the error of a script that must fail with one line, without a traceback."""
    message = run_here(script, *arguments, status=1, cwd=cwd)
    assert message.startswith('error: ') and '\n' not in message
    return message


def arrays(path):
    with numpy.load(path, allow_pickle=True) as f:
        return {name: f[name] for name in f}


def rows(path):
    with open(path, newline='') as f:
        return list(csv.DictReader(f))


def imported(folder, name):
    """Import a module of an example, which itself finds examples/common."""
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
