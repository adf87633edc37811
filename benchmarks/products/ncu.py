"""Read hardware counters of a program's kernels with Nsight Compute's command line."""

import csv
import io
import shutil
import subprocess


def run(metrics, command, warm=False):
    """Run a program under ``ncu`` and return what :func:`parse` does.

    Kernels between ``cudaProfilerStart`` and ``cudaProfilerStop`` are read. The clocks are left as
    they are.

    Args:
        metrics (sequence of str): what to read.
        command (list of str): the program and its arguments.
        warm (bool): leave the caches as the program did; else they are emptied before every kernel.

    Raises:
        RuntimeError: ``ncu`` or the program failed, or no kernel was read.
    """
    program = shutil.which('ncu') or '/usr/local/cuda/bin/ncu'
    done = subprocess.run(
        [
            program,
            '--clock-control',
            'none',
            '--profile-from-start',
            'off',
            '--csv',
            '--page',
            'raw',
            '--cache-control',
            'none' if warm else 'all',
            '--metrics',
            ','.join(metrics),
            *command,
        ],
        text=True,
        capture_output=True,
    )
    kernels = parse(done.stdout, metrics) if done.returncode == 0 else []
    if not kernels:
        raise RuntimeError(
            'ncu: expected counters, got exit status %d\n%s\n%s'
            % (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
        )
    return kernels


def profiled(call):
    """Make a call between the profiler's marks: the kernels that :func:`run` reads."""
    import cupy

    cupy.cuda.Device().synchronize()
    cupy.cuda.profiler.start()
    call()
    cupy.cuda.Device().synchronize()
    cupy.cuda.profiler.stop()


def parse(text, metrics):
    """Return one dict a kernel, its 'kernel' (str) and the metrics (float), from ncu's raw CSV.

    Args:
        text (str): ncu's output: its own lines, lines of the program, a header, units, a line a
            kernel.
        metrics (sequence of str): which columns.
    """
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(
        io.StringIO('\n'.join(line for line in lines[header:] if line.startswith('"')))
    )
    return [
        {
            'kernel': row['Kernel Name'],
            **{metric: float(row[metric].replace(',', '')) for metric in metrics},
        }
        for row in rows
        if row['ID']
    ]  # the units have none
