"""docs/quickstart.md: its script runs, and predicts what it says."""

import re

import pytest

from tests.examples.scripts import ROOT
from tests.examples.scripts import run

PAGE = ROOT / 'docs' / 'quickstart.md'


def test_script(tmp_path):
    pytest.importorskip('rdkit')
    (script,) = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
    expected = [float(number) for number in re.findall(r'[\d.]+', script.split('# close to')[1])]
    printed = run('-c', script, cwd=tmp_path)
    predicted = [float(number) for number in re.findall(r'\d+\.\d+', printed)]
    assert predicted == pytest.approx(expected, rel=0.15)
    assert len(script.splitlines()) <= 30
