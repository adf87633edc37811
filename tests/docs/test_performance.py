"""Tables and numbers of the pages agree with the stored results."""

import json
import pathlib
import re

import pytest

pytest.importorskip('rdkit')

from benchmarks import answers, harness, tables  # NOQA: E402
from benchmarks.training import bench_two_lines, step_contenders  # NOQA: E402

ROOT = pathlib.Path(__file__).parents[2]
README, PERFORMANCE = 'README.md', 'docs/performance.md'


def agrees(cell, value):
    """Return whether a cell is a value, rounded to the cell's digits; '-' is None.

    Zeros at the end of an integer do not count as digits: 611,000 has three.
    """
    if cell == '-' or value is None:
        return cell == '-' and value is None
    text = cell.rstrip(' %').replace(',', '')
    n_zeros = len(text) - len(text.rstrip('0'))
    decimals = len(text.partition('.')[2])
    unit = 10.0**-decimals if '.' in text else 10.0**n_zeros
    return abs(float(text) - value) <= 0.5001 * unit


@pytest.mark.parametrize(
    'cell, right, wrong',
    [
        ('0.33', 0.335, 0.336),
        ('97 %', 97.4, 98),
        ('611,000', 610678, 612000),
        ('-', None, 1),
        ('1', 1.4, None),
    ],
)
def test_a_cell_agrees_with_values_that_it_rounds(cell, right, wrong):
    assert agrees(cell, right)
    assert not agrees(cell, wrong)


@pytest.mark.parametrize('path', tables.PAGES, ids=lambda path: path.name)
def test_tables_are_of_the_stored_results(path):
    """`python -m benchmarks.tables` would change nothing, and no stored result is missing."""
    page = path.read_text()
    assert tables.page(page) == (page, [])


def test_every_table_is_on_a_page():
    text = ''.join(path.read_text() for path in tables.PAGES)
    assert {found[2] for found in tables.BLOCK.finditer(text)} == set(tables.TABLES)


def commits(*folders):
    """Return the commit of each stored result of some folders, by its folder and name."""
    paths = [path for name in folders for path in (harness.RESULTS / name).glob('*.json')]
    return {
        f'{path.parent.name}/{path.name}': json.loads(path.read_text())['conditions']['commit']
        for path in paths
    }


def test_results_are_of_the_commit_of_the_page_or_named_there_with_their_own():
    text = ' '.join((ROOT / PERFORMANCE).read_text().split())
    (commit,) = re.findall('results come from commit ([0-9a-f]+),', text)
    newer, older = harness.GPUS
    others = {name: of for name, of in commits(newer, 'cpu').items() if of != commit}
    assert [name for name, of in others.items() if f'{name}), commit {of};' not in text] == []
    assert [of for of in commits(older).values() if f'commit {of},' not in text] == []


def test_a_result_is_of_one_gpu():
    newer, older = harness.GPUS
    names = {path.name for path in (harness.RESULTS / newer).iterdir()}
    assert not names & {path.name for path in (harness.RESULTS / older).iterdir()}


@pytest.mark.parametrize(
    'page, n_better, n_worse', [('README.md', 1, 1), ('docs/methods.md', 3, 3)]
)
def test_quality_in_the_text(page, n_better, n_worse):
    """`0.79 instead of 0.71 with RelGCN` is a ROC-AUC, or an error if the unit is bohr³."""
    summary = json.loads(harness.stored('quality').read_text())['summary']
    text = ' '.join((ROOT / page).read_text().split())
    found = re.findall(r'([\d.]+)( bohr³)? instead of ([\d.]+) with (\w+)', text)
    assert [bool(unit) for _, unit, _, _ in found] == [False] * n_better + [True] * n_worse
    for ours, unit, upstream, name in found:
        arms = summary['qm9 alpha' if unit else 'tox21'][name.lower()]
        arm = arms['packed' if unit else 'folded to the largest']
        for cell, value in ((ours, arm['mean']), (upstream, arms['dense']['mean'])):
            assert agrees(cell, value), (cell, value)


def stored(name, on_cpu=False):
    return json.loads(harness.stored(name, on_cpu).read_text())


def over_upstream(cell):
    return step_contenders.ratio(cell, step_contenders.ON_DEVICE, step_contenders.UPSTREAM)


def geometric_over_captured(cell):
    return step_contenders.ratio(cell, step_contenders.CAPTURED, step_contenders.GEOMETRIC_CAPTURED)


def folded_over_jax(precision):
    def over(cell):
        return step_contenders.over_jax(cell, precision, step_contenders.ON_DEVICE)

    return answers.steps(stored('jax'), over)


def eager(*batches):
    return answers.steps(stored('captured'), answers.eager_over_upstream, batches)


@pytest.mark.parametrize(
    'page, sentence, values',
    [
        (
            README,
            "on one thread an epoch on Tox21 is {} to {} times as fast as upstream's",
            lambda: answers.epochs(stored('two_lines', True), 'Tox21'),
        ),
        (
            README,
            'so an epoch on its sample is {} to {} times as fast',
            lambda: answers.epochs(stored('two_lines', True), answers.SMALL_SAMPLE),
        ),
        (
            README,
            'the two lines make an epoch [{} to {} times]',
            lambda: answers.epochs(stored('two_lines')),
        ),
        (
            README,
            "an eager step of 32 molecules is {} to {} times as fast as upstream's",
            lambda: eager('32'),
        ),
        (
            README,
            '`predict` of dense examples on a GPU is only {} to {} times as fast',
            lambda: answers.predictions(stored('two_lines')),
        ),
        (
            README,
            'it is {} to {} times as fast. On a CPU',
            lambda: answers.predictions(stored('two_lines'), bench_two_lines.SPARSE),
        ),
        (
            PERFORMANCE,
            "eager steps are {} to {} times as fast as upstream's up to batch 128",
            lambda: eager('32', '128'),
        ),
        (PERFORMANCE, 'and {} to {} times at 1,024', lambda: eager('1024')),
        (
            PERFORMANCE,
            'the factor over upstream is {} (GGNN, QM9, 1,024) to {} (NFP, QM9, 32)',
            lambda: answers.steps(stored('captured'), over_upstream, ['32', '1024']),
        ),
        (
            PERFORMANCE,
            'whose batches the host assembles, takes {} to {} times as long as ours',
            lambda: answers.steps(stored('captured'), geometric_over_captured),
        ),
        (
            PERFORMANCE,
            'ours is {} to {} times as fast as JAX in FP32',
            lambda: folded_over_jax('FP32'),
        ),
        (PERFORMANCE, 'and {} to {} times as fast as JAX in TF32', lambda: folded_over_jax('TF32')),
    ],
)
def test_ranges_in_the_text(page, sentence, values):
    text = ' '.join((ROOT / page).read_text().split())
    pattern = re.escape(sentence).replace(r'\{\}', r'(\d[\d.]*)')
    (numbers,) = re.findall(pattern, text)
    ends = min(values()), max(values())
    for number, end in zip(numbers, ends):
        assert agrees(number, end), (number, end)


def test_number_of_cases_of_parity():
    text = ' '.join((ROOT / README).read_text().split())
    assert 'of %d models and options' % len(stored('parity', True)['cases']) in text
