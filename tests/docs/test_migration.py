"""docs/migration.md: its script runs before and after the change, with the same output."""

import re

import pytest

from tests.support.processes import python, ROOT


def test_script(tmp_path):
    pytest.importorskip('rdkit')
    page = (ROOT / 'docs' / 'migration.md').read_text()
    blocks = re.findall(r'```diff\n(.*?)```', page, re.DOTALL)
    (block,) = [block for block in blocks if 'CSVFileParser' in block]
    (tmp_path / 'examples').symlink_to(ROOT / 'examples')
    printed = []
    for sign, words in (('-', ['-m', 'chainer_bspmm', 'run', 'script.py']), ('+', ['script.py'])):
        lines = [line[1:] for line in block.splitlines() if line[:1] in (' ', sign, '')]
        (tmp_path / 'script.py').write_text('\n'.join(lines))
        printed.append(python(*words, cwd=tmp_path).stdout.splitlines()[-1])
    assert printed[0] == printed[1] and printed[0].startswith('mean absolute error of the gap: 0.')
