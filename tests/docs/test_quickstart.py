"""docs/quickstart.md: its script runs and gives the predictions of the page."""

import re

import pytest

from tests.support.processes import python, ROOT

PAGE = ROOT / 'docs' / 'quickstart.md'


def test_script(tmp_path):
    pytest.importorskip('rdkit')
    (script,) = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
    said = script.split('print(')[1].split('  # ')[1]
    numbers = [float(number) for number in re.findall(r'\d+\.\d+', said)]
    printed = python('-c', script, cwd=tmp_path).stdout
    predicted = [float(number) for number in re.findall(r'\d+\.\d+', printed)]
    assert predicted == pytest.approx(numbers[:2], abs=0.2)  # BLAS libraries round differently
    assert predicted == pytest.approx(numbers[2:], rel=0.02)
    assert len(script.splitlines()) <= 30
