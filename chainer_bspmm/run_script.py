"""``python -m chainer_bspmm run SCRIPT.py``: run an unchanged script on a repaired Chainer."""

import importlib.machinery
import io
import multiprocessing
import multiprocessing.spawn
import os
import pathlib
import sys
import types

from chainer_bspmm.compat import script_repairs  # noqa: F401  fills the table of repairs


# This variable has the ``sys.prefix`` of the environment whose interpreters are repaired.
VARIABLE = 'CHAINER_BSPMM_RUN'


def repair_interpreters():
    """Make Python interpreters that this process starts import chainer_bspmm before Chainer.

    Interpreters that joblib, scikit-learn or subprocess start inherit PYTHONPATH, on which they
    find ``in_children/sitecustomize.py``.
    """
    folder = str(pathlib.Path(__file__).resolve().with_name('in_children'))
    path = os.environ.get('PYTHONPATH')
    entries = path.split(os.pathsep) if path else []
    if folder not in entries:
        os.environ['PYTHONPATH'] = os.pathsep.join([folder, *entries])
    os.environ[VARIABLE] = sys.prefix


def repair_child_processes():
    """Make processes of multiprocessing import chainer_bspmm before the script.

    A forked process has it already; a spawned one, or one of a fork server, runs the script's top
    level itself.
    """
    # This replaces the default, the script, which the server would run before any repair.
    multiprocessing.set_forkserver_preload(['chainer_bspmm.run_script'])
    original = multiprocessing.spawn.get_command_line
    # The package may be on sys.path only because its folder is the current one. A child process may
    # have another current folder.
    root = str(pathlib.Path(__file__).resolve().parents[1])
    prelude = (
        'import sys; sys.path.append(%r); from chainer_bspmm import run_script; '
        'run_script.repair_child_processes(); ' % root
    )

    def get_command_line(**options):
        command = list(original(**options))
        if '-c' in command:
            place = command.index('-c') + 1
            command[place] = prelude + command[place]
        return command

    multiprocessing.spawn.get_command_line = get_command_line


def _hide_frames_above(codes):
    """Print uncaught exceptions without the frames that have called these code objects."""
    previous = sys.excepthook

    def excepthook(kind, error, traceback):
        frame = traceback
        while frame is not None and frame.tb_frame.f_code not in codes:
            frame = frame.tb_next
        # A script that does not compile has no frame: Python shows only the line.
        if frame is not None or isinstance(error, SyntaxError):
            error, traceback = error.with_traceback(frame), frame
        previous(kind, error, traceback)

    sys.excepthook = excepthook


def run_script(path, arguments):
    """Run a Python script as ``python path arguments...`` would."""
    # ``sys.argv``, ``sys.path[0]`` and ``__main__`` are the script's, so its classes are pickled as
    # classes of ``__main__``. Exceptions propagate, including SystemExit and errors from reading
    # the file.
    full_path = os.path.abspath(path)
    with io.open_code(full_path) as f:
        source = f.read()
    main = types.ModuleType('__main__')
    main.__file__ = full_path
    main.__loader__ = importlib.machinery.SourceFileLoader('__main__', full_path)
    vars(main)['__builtins__'] = sys.modules['builtins']
    # Some of these exist only in some versions of Python.
    for name, value in ('__annotations__', {}), ('__cached__', None):
        if name in vars(sys.modules['__main__']):
            vars(main)[name] = value
    # multiprocessing uses the second name for objects that a child process returns.
    sys.modules['__main__'] = sys.modules['__mp_main__'] = main
    sys.argv[:] = [path] + arguments
    # Under -I and -P neither the current folder nor the script's is on the path.
    if not (sys.flags.isolated or getattr(sys.flags, 'safe_path', False)):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    repair_interpreters()
    repair_child_processes()
    codes = []
    _hide_frames_above(codes)
    codes.append(compile(source, full_path, 'exec', dont_inherit=True))
    exec(codes[0], vars(main))
