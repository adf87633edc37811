"""The cost of a training: seconds per step, peak memory, and the machine."""

import os
import platform
import time

import chainer_bspmm  # first: lets Chainer import on today's Python and NumPy
import chainer
import chainer_chemistry
import numpy
from chainer import training
from chainer_bspmm.training import GraphUpdater

WARM_UP = 2  # steps that allocate, compile kernels, and capture


class Timed:
    """What an updater needs to time its steps: batch, converter, model, optimizer.

    On a GPU a step returns before that is done. There steps are timed in rounds, from the start of
    the first until the GPU is done with the last. A round ends with the epoch at the latest,
    before extensions do their part.

    Attributes:
        seconds (list of float): of each step; within a round all are its mean.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seconds = []
        self.steps_a_round = 1 if self.input_device.xp is numpy else 100
        self._n_steps = 0  # of the round under way

    def update(self):
        if not self._n_steps:
            self._start = time.perf_counter()
        super().update()
        self._n_steps += 1
        if self._n_steps == self.steps_a_round or self.is_new_epoch or len(self.seconds) < WARM_UP:
            self.wait()
            mean = (time.perf_counter() - self._start) / self._n_steps
            self.seconds += [mean] * self._n_steps
            self._n_steps = 0

    def wait(self):
        """Wait until the GPU, if it is one, is done."""
        if self.input_device.xp is not numpy:
            self.input_device.device.synchronize()


class TimedUpdater(Timed, training.StandardUpdater):
    """Chainer's usual updater with :class:`Timed`."""


class TimedGraphUpdater(Timed, GraphUpdater):
    """The updater of captured steps with :class:`Timed`."""


UPDATERS = {'standard': TimedUpdater, 'graph': TimedGraphUpdater}  # by their option


def milliseconds_a_step(seconds):
    """Return median, first and ninth decile of all steps but the first two; None without such."""
    if len(seconds) <= WARM_UP:
        return None
    low, median, high = 1e3 * numpy.percentile(seconds[WARM_UP:], [10, 50, 90])
    return {
        'median': round(float(median), 3),
        'low': round(float(low), 3),
        'high': round(float(high), 3),
        'steps': len(seconds) - WARM_UP,
    }


def peak_memory(device, updater):
    """Return the most memory that this process has held, in bytes.

    Returns:
        dict: 'host', resident; None where the system does not tell. On a GPU also 'GPU pool': what
        CuPy's memory pool holds, which does not shrink by itself; and with captured steps
        'CUDA graphs': the memory of the graphs themselves.
    """
    found = {'host': _peak_resident()}
    if device.xp is not numpy:
        found['GPU pool'] = device.xp.get_default_memory_pool().total_bytes()
    if isinstance(updater, GraphUpdater):
        found['CUDA graphs'] = updater.graph_nbytes
    return found


def _peak_resident():
    try:
        # Not getrusage: its number starts with that of the process that started this one.
        with open('/proc/self/status') as f:
            return next(1024 * int(line.split()[1]) for line in f if line.startswith('VmHWM'))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == 'Darwin' else 1024 * peak


def conditions(device):
    """Return where a run took place: processor, threads, versions."""
    threads = {
        name: os.environ[name]
        for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS')
        if name in os.environ
    }
    cpu = platform.processor() or platform.machine()
    try:
        with open('/proc/cpuinfo') as f:
            cpu = next(line.split(':')[1].strip() for line in f if line.startswith('model name'))
    except (OSError, StopIteration):
        pass
    found = {
        'cpu': cpu,
        'n_cpus': os.cpu_count(),
        'threads': threads,
        'device': str(device),
        'python': platform.python_version(),
        'numpy': numpy.__version__,
        'chainer': chainer.__version__,
        'chainer_chemistry': chainer_chemistry.__version__,
        'chainer_bspmm': chainer_bspmm.__version__,
    }
    if device.xp is not numpy:
        found['cupy'] = device.xp.__version__
        properties = device.xp.cuda.runtime.getDeviceProperties(device.device.id)
        found['gpu'] = properties['name'].decode()
    return found


def cost_report(step, memory):
    """Return the lines that a training prints at its end."""
    lines = []
    if step is not None:
        lines.append(
            'Time a step: %.2f ms, median of %d (batch, converter, forward, backward, '
            'update)' % (step['median'], step['steps'])
        )
    parts = ['%s %.0f MB' % (name, size / 1e6) for name, size in memory.items() if size is not None]
    if parts:
        lines.append('Peak memory: %s' % ', '.join(parts))
    return lines
