"""Run the training scripts of ``examples/`` as a user does."""

import json
import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

from benchmarks.harness import ROOT

OPTIONS = ['--unit-num', '64', '--batchsize', '128']
OWN_OPTIONS = {'tox21': [], 'qm9': ['--label', 'alpha']}
# One thread, because products are small: more would speed up neither model, but add noise.
THREADS = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}

# Processes of this server start with the large packages imported, which saves an example seconds.
SERVER = multiprocessing.get_context('forkserver')
SERVER.set_forkserver_preload(
    [
        'chainer_bspmm',
        'chainer_bspmm.training',
        'chainer_chemistry.models',
        'matplotlib.pyplot',
        'pandas',
        'rdkit.Chem',
        'sklearn.metrics',
    ]
)


def environment():
    """Return the environment variables of the scripts."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    return dict(os.environ, PYTHONPATH=path, **THREADS)


def run_preloaded(argv, stdout, stderr, cwd=None, cpus=None, timeout=None, variables=None):
    """Run a script in a process that has imported the large packages; return the exit status.

    `argv`: the script and its arguments. `stdout`, `stderr`: files. `cpus`: numbers of processors.
    After `timeout` seconds it is killed. The processes of all runs have the environment of the
    first run, and their own `variables`, which the packages must not have read at their import.
    """
    process = SERVER.Process(target=_main, args=(argv, stdout, stderr, cwd, cpus, variables or {}))
    process.start()
    process.join(timeout)
    process.kill()
    process.join()
    return process.exitcode


def _main(argv, stdout, stderr, cwd, cpus, variables):
    for stream, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    if cwd is not None:
        os.chdir(cwd)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    os.environ.update(variables)
    sys.argv[:] = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    runpy.run_path(argv[0], run_name='__main__')


def train(example, options, preloaded=False, cpus=None, variables=None):
    """Train an example into a folder that is removed; return its result and its log of epochs.

    `options` come after OPTIONS. `preloaded`: save the time of imports by :func:`run_preloaded`;
    the host's peak memory then differs from a script's. `cpus` and `variables` are passed to it. If
    the script fails, the RuntimeError ends with its output.
    """
    script = ROOT / 'examples' / example / ('train_%s.py' % example)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / 'out'
        argv = [str(script), '--out', str(out), *OPTIONS, *OWN_OPTIONS[example]]
        argv += [str(option) for option in options]
        if preloaded:
            printed = pathlib.Path(folder) / 'stderr'
            status = run_preloaded(argv, os.devnull, str(printed), cpus=cpus, variables=variables)
            if status:
                raise RuntimeError(
                    'exit status %s: %s' % (status, printed.read_text()[-400:].strip())
                )
        else:
            subprocess.run([sys.executable, *argv], check=True, env=environment())
        result = json.loads((out / 'result.json').read_text())
        result['log'] = json.loads((out / 'log').read_text())
    result['settings']['data'] = os.path.basename(result['settings']['data'])
    return result
