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
STEPS_A_ROUND = 100
FIRST, LAST = 1000, -1000  # priorities of extensions


class StepTimer(training.Extension):
    """Time the steps of a Trainer: batch, converter, model, optimizer, and what reports each step.

    On a GPU a step returns before that is done. There steps are timed in rounds, from the start of
    the first until the GPU is done with the last. A round ends with the epoch at the latest,
    before other extensions do their part.

    Args:
        trainer (chainer.training.Trainer): extended by this.
        device (chainer.backend.Device): where it trains.

    Attributes:
        rounds (list): (steps (int), seconds of each of them (float)).
    """

    def __init__(self, trainer, device):
        self.rounds = []
        self._device = device
        self._start = None
        every = 1 if device.xp is numpy else STEPS_A_ROUND

        def again(trainer):  # a function: Trainer gives it a name
            self.initialize(trainer)

        for trigger in ((every, 'iteration'), (1, 'epoch')):
            names = ['timer: %s of rounds, %s' % (what, trigger[1]) for what in ('end', 'start')]
            trainer.extend(self, names[0], trigger, FIRST)
            trainer.extend(again, names[1], trigger, LAST)

    def initialize(self, trainer):
        """Start a round."""
        self._wait()
        self._start = trainer.updater.iteration, time.perf_counter()

    def __call__(self, trainer):
        """End a round."""
        if self._start is None:  # the other trigger has ended it
            return
        self._wait()
        iteration, start = self._start
        n_steps = trainer.updater.iteration - iteration
        self.rounds.append((n_steps, (time.perf_counter() - start) / n_steps))
        self._start = None

    def _wait(self):
        if self._device.xp is not numpy:
            self._device.device.synchronize()


def milliseconds_a_step(rounds):
    """Return mean, median, first and ninth decile of all steps but those of the first rounds.

    Args:
        rounds (list): of a `StepTimer`. Those with the first `WARM_UP` steps are left out.

    Returns:
        dict or None: None if there are no others.
    """
    before = numpy.cumsum([0] + [n_steps for n_steps, _ in rounds])
    counted = [each for each, n in zip(rounds, before) if n >= WARM_UP]
    if not counted:
        return None
    seconds = numpy.repeat([each for _, each in counted], [n_steps for n_steps, _ in counted])
    low, median, high = 1e3 * numpy.percentile(seconds, [10, 50, 90])
    return {
        'mean': round(1e3 * float(seconds.mean()), 4),
        'median': round(float(median), 3),
        'low': round(float(low), 3),
        'high': round(float(high), 3),
        'steps': len(seconds),
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
