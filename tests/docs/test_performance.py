"""Tables of the pages and numbers in their text agree with the stored results."""

import json
import pathlib
import re

import pytest

pytest.importorskip('rdkit')

from benchmarks import harness, tables  # NOQA: E402

ROOT = pathlib.Path(__file__).parents[2]


def agrees(cell, value):
    if cell == '-' or value is None:
        return cell == '-' and value is None
    text = cell.rstrip(' %').replace(',', '')
    n_zeros = len(text) - len(text.rstrip('0'))
    decimals = len(text.partition('.')[2])
    unit = 10.0**-decimals if '.' in text else 10.0**n_zeros
    return abs(float(text) - value) <= 0.5001 * unit


def test_agrees():
    cells = ('0.33', 0.335, 0.336), ('97 %', 97.4, 98), ('611,000', 610678, 612000), ('-', None, 1)
    for cell, right, wrong in (*cells, ('1', 1.4, None)):
        assert agrees(cell, right) and not agrees(cell, wrong)


def test_tables():
    """`python -m benchmarks.tables` would change nothing, and the results of all are stored."""
    names = []
    for path in tables.PAGES:
        page = path.read_text()
        assert tables.page(page) == (page, [])
        names += [found[2] for found in tables.BLOCK.finditer(page)]
    assert sorted(names) == sorted(tables.TABLES)


def test_one_commit():
    """What is measured again is of one commit; what is not is kept apart, and says its own."""
    folders = [harness.RESULTS / name for name in (harness.GPU, 'cpu')]
    paths = [path for folder in folders for path in folder.glob('*.json')]
    commits = {json.loads(path.read_text())['conditions']['commit'] for path in paths}
    assert len(commits) == 1, commits


@pytest.mark.parametrize(
    'page, n_better, n_worse', [('README.md', 1, 1), ('docs/methods.md', 3, 3)]
)
def test_quality_in_the_text(page, n_better, n_worse):
    """`0.79 instead of 0.71 with RelGCN` is a ROC-AUC, in bohr³ it is an error."""
    summary = json.loads(harness.stored('quality').read_text())['summary']
    text = ' '.join((ROOT / page).read_text().split())
    found = re.findall(r'([\d.]+)( bohr³)? instead of ([\d.]+) with (\w+)', text)
    assert [bool(unit) for _, unit, _, _ in found] == [False] * n_better + [True] * n_worse
    for ours, unit, upstream, name in found:
        arms = summary['qm9 alpha' if unit else 'tox21'][name.lower()]
        arm = arms['packed' if unit else 'folded to the largest']
        for cell, value in ((ours, arm['mean']), (upstream, arms['dense']['mean'])):
            assert agrees(cell, value), (cell, value)
