"""Several GPUs at once: each has one task at a time, and a separate share of the processors."""

import concurrent.futures
import dataclasses
import os
import queue
import subprocess


@dataclasses.dataclass
class Place:
    """A GPU, by its number as text, or None for the host alone, and its share of the processors."""

    gpu: str | None
    cpus: list

    def run(self, command, environment=None, **options):
        """Run a command that sees this GPU as number 0; return its exit status."""
        variables = dict(os.environ, **(environment or {}))
        if self.gpu is not None:
            variables['CUDA_VISIBLE_DEVICES'] = self.gpu
        # This sets the affinity of the calling thread, which the processes that it starts inherit.
        os.sched_setaffinity(0, self.cpus)
        return subprocess.run(command, env=variables, **options).returncode


def places(n_gpus):
    """Return the `Place` of each GPU; with 0 GPUs, a single one with all processors."""
    cpus = sorted(os.sched_getaffinity(0))
    if not n_gpus:
        return [Place(None, cpus)]
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    numbers = visible.split(',') if visible else map(str, range(n_gpus))
    share = max(1, len(cpus) // n_gpus)
    return [
        Place(number, cpus[i * share :][:share] or cpus)
        for i, number in zip(range(n_gpus), numbers)
    ]


def spread(tasks, n_gpus, call):
    """Call ``call(task, place)`` for each task; return the results in the order of the tasks.

    A place takes the next task when it has finished one. After all tasks, the first exception is
    raised.
    """
    free = queue.SimpleQueue()
    for place in places(n_gpus):
        free.put(place)

    def run(task):
        place = free.get()
        try:
            return call(task, place)
        finally:
            free.put(place)

    with concurrent.futures.ThreadPoolExecutor(max(1, n_gpus)) as threads:
        return list(threads.map(run, tasks))
