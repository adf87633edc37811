"""The cost of a training: seconds per step, peak memory, and the machine."""

import os
import platform
import time

import chainer_bspmm
import chainer
import chainer_chemistry
import numpy
from chainer import training
from chainer_bspmm.training import GraphUpdater

WARM_UP = 2  # steps that allocate, compile kernels, and capture
FIRST = 1000  # priorities of extensions
LAST = -1000


class StepTimer(training.Extension):
    """Time the steps of a Trainer: `rounds` holds (number of steps, seconds of each of them).

    On a GPU a step returns before it is done. There the steps of an epoch are timed together,
    until the GPU is done with the last, before other extensions do their part.
    """

    def __init__(self, trainer, device):
        self.rounds = []
        self._device = device

        def again(trainer):  # a function: Trainer gives it a name
            self.initialize(trainer)

        trigger = 1, 'iteration' if device.xp is numpy else 'epoch'
        trainer.extend(self, 'timer: end of a round', trigger, FIRST)
        trainer.extend(again, 'timer: start of a round', trigger, LAST)

    def initialize(self, trainer):
        """Start a round."""
        self._start = trainer.updater.iteration, self._now()

    def __call__(self, trainer):
        """End a round."""
        iteration, start = self._start
        n_steps = trainer.updater.iteration - iteration
        self.rounds.append((n_steps, (self._now() - start) / n_steps))

    def _now(self):
        if self._device.xp is not numpy:
            self._device.device.synchronize()
        return time.perf_counter()


def milliseconds_a_step(rounds):
    """Return the median of all steps but those of the first rounds, and their number."""
    before = numpy.cumsum([0] + [n_steps for n_steps, _ in rounds])
    counted = [each for each, n in zip(rounds, before) if n >= WARM_UP]
    if not counted:
        return None
    n_steps, seconds = zip(*counted)
    median = 1e3 * numpy.median(numpy.repeat(seconds, n_steps))
    return {'median': round(float(median), 3), 'steps': sum(n_steps)}


def peak_memory(device, updater):
    """Return the most memory that this process has held, in bytes: the host's, where Linux tells.

    On a GPU also what CuPy's pool holds, which does not shrink by itself, and that of CUDA graphs.
    """
    found = {}
    if os.path.exists('/proc/self/status'):
        # Not getrusage: its number starts with that of the process that started this one.
        with open('/proc/self/status') as f:
            line = next(line for line in f if line.startswith('VmHWM'))
        found['host'] = 1024 * int(line.split()[1])
    if device.xp is not numpy:
        found['GPU pool'] = device.xp.get_default_memory_pool().total_bytes()
    if isinstance(updater, GraphUpdater):
        found['CUDA graphs'] = updater.graph_nbytes
    return found


def conditions(device):
    """Return where a run took place: machine, threads, versions."""
    found = {
        'cpu': platform.processor() or platform.machine(),
        'n_cpus': os.cpu_count(),
        'threads': {name: os.environ[name] for name in os.environ if name.endswith('_NUM_THREADS')},
        'device': str(device),
        'python': platform.python_version(),
    }
    for module in (numpy, chainer, chainer_chemistry, chainer_bspmm):
        found[module.__name__] = module.__version__
    if device.xp is not numpy:
        found['cupy'] = device.xp.__version__
        properties = device.xp.cuda.runtime.getDeviceProperties(device.device.id)
        found['gpu'] = properties['name'].decode()
    return found
