"""docs/migration.md: its script runs before and after the change, and prints the same."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.examples.scripts import environment

ROOT = pathlib.Path(__file__).parents[2]


def test_script(tmp_path):
    pytest.importorskip('rdkit')
    page = (ROOT / 'docs' / 'migration.md').read_text()
    blocks = re.findall(r'```diff\n(.*?)```', page, re.DOTALL)
    (block,) = [block for block in blocks if 'CSVFileParser' in block]
    (tmp_path / 'examples').symlink_to(ROOT / 'examples')
    printed = []
    for sign, command in (('-', ['-m', 'chainer_bspmm', 'run']), ('+', [])):
        lines = [line[1:] for line in block.splitlines() if line[:1] in (' ', sign, '')]
        (tmp_path / 'script.py').write_text('\n'.join(lines))
        done = subprocess.run(
            [sys.executable, *command, 'script.py'],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(),
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines()[-1])
    assert printed[0] == printed[1] and printed[0].startswith('mean absolute error of the gap: 0.')
