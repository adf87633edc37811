"""Tasks on several GPUs: each GPU has one task at a time, with its own processors."""

import os
import sys
import threading

import pytest

from benchmarks import gpus


@pytest.fixture
def processors(monkeypatch):
    """Let this process use processors 8 to 15 and every GPU."""
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(8, 16)))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)


def test_each_gpu_has_its_processors(processors):
    places = [(place.gpu, place.cpus) for place in gpus.places(3)]
    assert places == [('0', [8, 9]), ('1', [10, 11]), ('2', [12, 13])]


def test_without_gpus_there_is_one_place_with_all_processors(processors):
    (place,) = gpus.places(0)
    assert place.gpu is None
    assert sorted(place.cpus) == list(range(8, 16))


def test_only_visible_gpus_are_used(processors, monkeypatch):
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
            both.wait()  # two tasks run at once
        with lock:
            busy.remove(place.gpu)
        return task * 10

    assert gpus.spread(range(5), 2, call) == [0, 10, 20, 30, 40]


def test_an_exception_of_a_task_is_raised():
    with pytest.raises(ZeroDivisionError):
        gpus.spread([1, 0], 1, lambda task, place: 1 / task)


def test_a_command_sees_the_environment_of_its_place(tmp_path):
    text = 'import os; print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["A"], '
    text += 'sorted(os.sched_getaffinity(0)))'
    one = min(os.sched_getaffinity(0))
    with open(tmp_path / 'out', 'w') as out:

        def call(_, place):
            place = gpus.Place('3', [one])
            return place.run([sys.executable, '-c', text], {'A': 'b'}, stdout=out)

        assert gpus.spread([None], 1, call) == [0]
    assert (tmp_path / 'out').read_text() == '3 b [%d]\n' % one
