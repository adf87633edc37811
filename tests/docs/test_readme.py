"""README.md: its script runs as printed, and predicts what it says."""

import re

import pytest

from tests.examples.scripts import ROOT
from tests.examples.scripts import run


def test_script(tmp_path):
    pytest.importorskip('rdkit')
    page = (ROOT / 'README.md').read_text()
    ((script, text),) = re.findall(r'```python\n(.*?)```\n\n(.*?)\n', page, re.DOTALL)
    assert len([line for line in script.splitlines() if line]) <= 20
    (tmp_path / 'examples').symlink_to(ROOT / 'examples')  # what it writes stays here
    lines = run('-c', script, cwd=tmp_path).splitlines()
    numbers = [re.findall(r'\d+\.\d+', line) for line in lines[-3:]]
    stated = re.findall(r'([\d.]+) and ([\d.]+)[,.]', text)
    assert [line[0] for line in numbers] == [true for true, _ in stated]
    for (_, predicted), (_, expected) in zip(numbers, stated):
        assert float(predicted) == pytest.approx(float(expected), rel=0.05)
