"""docs/quickstart.md: its script runs, and predicts what it says."""

import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'quickstart.md'


def test_script(tmp_path):
    pytest.importorskip('rdkit')
    (script,) = re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL)
    expected = [float(number) for number in re.findall(r'[\d.]+', script.split('# close to')[1])]
    done = subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    predicted = [float(number) for number in re.findall(r'\d+\.\d+', done.stdout)]
    assert predicted == pytest.approx(expected, rel=0.15)
    assert len(script.splitlines()) <= 30
