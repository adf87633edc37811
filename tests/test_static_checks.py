"""Faults in code that only a GPU runs are found by `make lint`."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHECKED = 'chainer_bspmm', 'benchmarks', 'examples', 'tests', 'tools', 'docs'
DISABLED = {  # codes of mypy's messages that are not reported, as few as possible
    'arg-type', 'assignment', 'dict-item', 'func-returns-value', 'has-type', 'index', 'list-item',
    'method-assign', 'misc', 'operator', 'override', 'type-var', 'var-annotated',
}  # fmt: skip

# (file, text of a line, its replacement, code of mypy's message)
ROT = [
    (
        'chainer_bspmm/training/cuda_graphs.py',
        'owner = _Block(memory, self)',
        'owner = _Block(memory)',
        'call-arg',
    ),
    (
        'chainer_bspmm/training/program.py',
        'number = self._n_replays + 1',
        'number = self._count_replays + 1',
        'attr-defined',
    ),
    (
        'chainer_bspmm/ops/bspmm.py',
        'plan = sum_pieces_launch(n_pieces, n_channels, piece)',
        'plan = sum_pieces_launch(n_pieces, n_channels, length=piece)',
        'call-arg',
    ),
    (
        'chainer_bspmm/ops/bspmm.py',
        'plan = plans.dot_launch(adj.n_rows, n_channels, width)',
        'plan = plans.dot_launch(adj.n_rows, n_channels)',
        'call-arg',
    ),
    ('chainer_bspmm/cuda/launch.py', '*plan.arguments', '*plan.sizes', 'attr-defined'),
    (
        'chainer_bspmm/training/flat_gradients.py',
        'self._arguments(table, flat, loss, is_bad, n_molecules)',
        'self._arguments(table, flat, loss, is_bad, n_molecules, None)',
        'call-arg',
    ),
    (
        'tests/training/test_fused_update.py',
        'assert_same_steps(ours, theirs, 5)',
        'assert_same_steps(ours, theirs)',
        'call-arg',
    ),
    (
        'benchmarks/products/bench_large.py',
        'measure.replay_times(graphs, ROUNDS)',
        'measure.replayed_times(graphs, ROUNDS)',
        'attr-defined',
    ),
    ('tests/test_top_level.py', 'bspmm.check_swap is', 'bspmm.check_swop is', 'attr-defined'),
]


def sources():
    for folder in CHECKED:
        yield from sorted((ROOT / folder).rglob('*.py'))


def test_nothing_is_silenced():
    ignored = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path != pathlib.Path(__file__)
        for line in path.read_text(encoding='utf-8').splitlines()
        if re.search('# *(type: *ignore|mypy:)', line)
    ]
    assert not ignored
    config = (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
    disabled = re.search(r'disable_error_code = \[(.*?)\]', config, re.DOTALL)[1]
    assert set(re.findall('"(.+?)"', disabled)) <= DISABLED


def test_rot_can_be_planted():
    for name, before, _, _ in ROT:
        assert (ROOT / name).read_text(encoding='utf-8').count(before) == 1, (name, before)


@pytest.mark.slow
def test_rot_is_found(tmp_path):
    pytest.importorskip('mypy')
    for path in (*sources(), ROOT / 'pyproject.toml'):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    expected = set()
    for name, before, after, code in ROT:
        text = (tmp_path / name).read_text(encoding='utf-8')
        (tmp_path / name).write_text(text.replace(before, after), encoding='utf-8')
        expected.add((name, code))
    command = [sys.executable, '-m', 'mypy', '--cache-dir', str(tmp_path / 'cache')]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    found = re.findall(r'^(.+?):\d+: error: .*\[(.+?)\]$', done.stdout, re.MULTILINE)
    assert set(found) == expected and len(found) == len(ROT), done.stdout
