"""The full versions of all benchmarks, as one command."""

import pathlib
import types

import pytest

from benchmarks import __main__ as main, gpus

OPTIONS = {'gpus': 2, 'tox21': 'T', 'qm9': 'Q', 'chemprop': None, 'commit': 'c'}
NOT_STORED = {'training.bench_deferred'}


def arguments(**changes):
    return types.SimpleNamespace(**{**OPTIONS, **changes})


def test_full_versions_of_all_benchmarks_are_run():
    alone, together = main.full_runs(arguments(chemprop='P'))
    modules = pathlib.Path(main.__file__).parent
    names = {
        '.'.join(path.relative_to(modules).with_suffix('').parts)
        for path in modules.rglob('bench_*.py')
    }
    assert {words[0] for words in alone + together} == names - NOT_STORED | {'parity'}


@pytest.mark.parametrize('n_gpus, ranks', [(1, ['1']), (2, ['1', '2']), (4, ['1', '2', '4'])])
def test_ranks_have_a_gpu_each(n_gpus, ranks):
    *_, scaling = main.full_runs(arguments(gpus=n_gpus))[1]
    assert scaling[1 : 2 + n_gpus.bit_length()] == ['--ranks', *ranks]


def test_a_benchmark_that_fails_is_named_and_stops_no_other(tmp_path, monkeypatch):
    started = []

    def start(command, stdout, stderr, cwd):
        started.append(command[2])
        return types.SimpleNamespace(returncode=int('bench_scaling' in command[2]))

    def on_a_gpu(place, command, **options):
        started.append(command[2])
        return int('bench_large' in command[2])

    monkeypatch.setattr(main.subprocess, 'run', start)
    monkeypatch.setattr(gpus.Place, 'run', on_a_gpu)
    failed = main.run_full(arguments(out=str(tmp_path / 'new')))
    assert failed == ['products.bench_large', 'training.bench_scaling']
    assert len(started) == len({*started}) + 2  # bench_steps has three questions
    assert (tmp_path / 'new' / 'training.bench_steps_--against_jax.log').exists()


def test_the_full_versions_read_all_data(capsys, monkeypatch):
    monkeypatch.setattr('sys.argv', ['benchmarks', '--full', '--commit', 'c', '--tox21', 'T'])
    with pytest.raises(SystemExit):
        main.main()
    assert capsys.readouterr().err.endswith('--full: expected --tox21 and --qm9\n')
