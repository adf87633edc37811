"""Tasks on several GPUs: one at a time on each, with its own processors."""

import os
import sys
import threading

import pytest

from benchmarks import gpus


def test_each_gpu_has_its_processors(monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(8, 16)))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    cpus = [(place.gpu, place.cpus) for place in gpus.places(3)]
    assert cpus == [('0', [8, 9]), ('1', [10, 11]), ('2', [12, 13])]
    assert [(place.gpu, len(place.cpus)) for place in gpus.places(0)] == [(None, 8)]
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '2,5')
    assert [place.gpu for place in gpus.places(2)] == ['2', '5']


def test_one_task_at_a_time_on_each():
    busy = set()
    lock = threading.Lock()
    both = threading.Barrier(2, timeout=30)

    def call(task, place):
        with lock:
            assert place.gpu not in busy
            busy.add(place.gpu)
        if task < 2:
            both.wait()  # two at once
        with lock:
            busy.remove(place.gpu)
        return task * 10

    assert gpus.spread(range(5), 2, call) == [0, 10, 20, 30, 40]
    with pytest.raises(ZeroDivisionError):
        gpus.spread([1, 0], 1, lambda task, place: 1 / task)


def test_a_command_sees_its_gpu_and_processors(tmp_path):
    text = 'import os; print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["A"], '
    text += 'sorted(os.sched_getaffinity(0)))'
    one = min(os.sched_getaffinity(0))
    with open(tmp_path / 'out', 'w') as out:

        def call(_, place):
            place = gpus.Place('3', [one])
            return place.run([sys.executable, '-c', text], {'A': 'b'}, stdout=out)

        assert gpus.spread([None], 1, call) == [0]
    assert (tmp_path / 'out').read_text() == '3 b [%d]\n' % one
