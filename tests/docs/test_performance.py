"""Tables and numbers of the pages agree with the stored results."""

import json
import pathlib
import re

import pytest

pytest.importorskip('rdkit')

from benchmarks import answers, bench_command, harness, tables  # NOQA: E402
from benchmarks.training import bench_chemprop, bench_two_lines  # NOQA: E402
from benchmarks.training import bench_widths, step_contenders  # NOQA: E402

ROOT = pathlib.Path(__file__).parents[2]
WIDE = '256', '512'
README, PERFORMANCE, LEARNING = 'README.md', 'docs/performance.md', 'docs/learning.md'
METHODS = 'docs/methods.md'


def words_of(page):
    """Return the text of a page with one blank between words, as if it had one line."""
    return ' '.join((ROOT / page).read_text().split())


def stored(name, on_cpu=False):
    return json.loads(harness.stored(name, on_cpu).read_text())


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
    text = words_of(PERFORMANCE)
    (commit,) = re.findall('results come from commit ([0-9a-f]+),', text)
    others = {name: of for name, of in commits(harness.GPU, 'cpu').items() if of != commit}
    assert [name for name, of in others.items() if f'{name}), commit {of};' not in text] == []


def test_all_runs_of_how_well_models_learn_are_of_one_commit_and_machine():
    runs = stored('quality')['runs']
    ((commit, machine),) = {(run['commit'], run['machine']) for run in runs}
    text = words_of(LEARNING)
    assert f'All runs are of commit {commit} on an {machine.split()[-1]}.' in text


@pytest.mark.parametrize('page, n_better, n_worse', [(README, 1, 1), (METHODS, 3, 3)])
def test_quality_in_the_text(page, n_better, n_worse):
    """`0.79 instead of 0.71 with RelGCN` is a ROC-AUC, or an error if the unit is bohr³."""
    summary = stored('quality')['summary']
    text = words_of(page)
    found = re.findall(r'([\d.]+)( bohr³)? instead of ([\d.]+) with (\w+)', text)
    assert [bool(unit) for _, unit, _, _ in found] == [False] * n_better + [True] * n_worse
    for ours, unit, upstream, name in found:
        arms = summary['qm9 alpha' if unit else 'tox21'][name.lower()]
        arm = arms['packed' if unit else 'folded to the largest']
        for cell, value in ((ours, arm['mean']), (upstream, arms['dense']['mean'])):
            assert agrees(cell, value), (cell, value)


def test_errors_of_packed_models_on_all_of_qm9_in_the_text():
    summary = stored('quality')['summary']['all qm9 alpha']
    text = words_of(METHODS)
    (numbers,) = re.findall(
        r'On all of QM9 it is ([\d.]+) \(RelGCN\) and ([\d.]+) \(GGNN\) times', text
    )
    for number, name in zip(numbers, ('relgcn', 'ggnn')):
        assert agrees(number, summary[name]['packed']['mean'] / summary[name]['dense']['mean'])


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


def on_device(cell):
    """Return the device time of captured PyTorch Geometric over ours."""
    both = step_contenders.GEOMETRIC_CAPTURED, step_contenders.ON_DEVICE
    if both[0] in cell['milliseconds']:
        theirs, ours = (cell['milliseconds'][name]['device'] for name in both)
        return theirs / ours


def peak_bytes(name):
    """Return the memory of a contender, for each batch of RSGCN on Tox21."""
    batches = stored('captured')['data']['tox21']['methods']['rsgcn']['batches']
    return [cell['peak_bytes'][name] / 1e6 for cell in batches.values()]


def more_memory(cell):
    ours, upstream = (
        cell['peak_bytes'][name] for name in (step_contenders.ON_DEVICE, step_contenders.UPSTREAM)
    )
    return ours / upstream


def of_qm9(result):
    return {**result, 'data': {'qm9': result['data']['qm9']}}


def commands(data, name, *kinds):
    """Return the runs of a contender with caches of these kinds, in the result of bench_command."""
    methods = stored('command')['data'][data]['methods'].values()
    return [run for of in methods for kind in kinds for run in of[name][kind]['runs']]


def first_epochs_and_trainings():
    """Return the seconds of the first epoch and of the whole training, for each run on Tox21."""
    runs = commands('tox21', bench_command.CAPTURED, bench_command.WARM)
    return [(run['epochs'][0], run['phases']['training']) for run in runs]


def parsing_by_upstream():
    runs = commands('qm9', bench_command.UPSTREAM, bench_command.WARM, bench_command.COLD)
    return [run['phases']['data'] for run in runs]


def busy(with_labels_of_atoms):
    """Return the percentages of time in which the GPU is busy, with other methods than usual."""
    return [
        100 * found['busy']
        for method, of in stored('methods')['data']['tox21']['methods'].items()
        if method.endswith(('_cwle', '_gwle')) == with_labels_of_atoms
        for cell in of['batches'].values()
        for found in cell['milliseconds'].values()
        if 'busy' in found
    ]


def errors_of_packed(data):
    """Return by how many per cent the mean errors of packed models are larger than upstream's."""
    methods = stored('quality')['summary'][data].values()
    return [100 * (of['packed']['mean'] / of['dense']['mean'] - 1) for of in methods]


def chemprop_over_ours():
    """Return the time of chemprop over ours on a GPU, for each data set and seed."""
    found = []
    for of in stored('chemprop')['data'].values():
        theirs, ours = (
            [run['seconds'] for run in of['runs'] if run['contender'] == name]
            for name in (bench_chemprop.CHEMPROP, bench_chemprop.OURS)
        )
        found += [slow / fast for slow, fast in zip(theirs, ours)]
    return found


def device_times(cell):
    """Return the device times of our step, in FP32 and in TF32."""
    return [cell['milliseconds'][ours]['device'] for ours in bench_widths.OURS.values()]


def over_products(cell):
    """Return the device times of our step over its products', in FP32 and in TF32."""
    return [bench_widths.over_products(cell, precision) for precision in bench_widths.OURS]


def device_times_again():
    """Return (units, method) -> percentages by which device times are shorter in the second run."""
    first, second = (
        dict(bench_widths.cells(stored(name)['data'])) for name in ('widths', 'widths_again')
    )
    found = {}
    for (units, method, n_batch), cell in second.items():
        times = zip(device_times(first[units, method, n_batch]), device_times(cell))
        percentages = [100 - 100 * again / before for before, again in times]
        found.setdefault((units, method), []).extend(percentages)
    return found


def savings_of_ggnn():
    found = device_times_again()
    return [saving for units in WIDE for saving in found[units, 'ggnn']]


def steps_of_128(name):
    """Return the steps of 128 molecules of Tox21 with 64 units, for each of five models."""
    data = stored(name)['data']
    methods = data['tox21']['methods'] if name == 'captured' else data['64']
    return [
        methods[method]['batches']['128'] for method in ('rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp')
    ]


def of_slower_host():
    """Return upstream's time among the captured steps over that among the wide layers."""
    first, second = (
        [cell['milliseconds'][step_contenders.UPSTREAM]['wall']['median'] for cell in cells]
        for cells in map(steps_of_128, ('captured', 'widths'))
    )
    return [slow / fast for slow, fast in zip(first, second)]


def widths_over_upstream(name):
    ours = bench_widths.OURS['FP32']
    return [
        step_contenders.ratio(cell, ours, step_contenders.UPSTREAM) for cell in steps_of_128(name)
    ]


def over_products_of_ggnn():
    """Return the device times of wide steps of GGNN over their products', in the second run."""
    data = stored('widths_again')['data']
    cells = [data[units]['ggnn']['batches'][batch] for units in WIDE for batch in ('128', '1024')]
    return [over for cell in cells for over in over_products(cell)]


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
            'whose batches the host assembles, takes {} to {} times as long as our captured step',
            lambda: answers.steps(stored('captured'), geometric_over_captured),
        ),
        (
            PERFORMANCE,
            'ours is {} to {} times as fast as JAX in FP32',
            lambda: folded_over_jax('FP32'),
        ),
        (PERFORMANCE, 'and {} to {} times as fast as JAX in TF32', lambda: folded_over_jax('TF32')),
        (
            PERFORMANCE,
            'In device time it takes {} to {} times as long',
            lambda: answers.steps(stored('captured'), on_device),
        ),
        (
            PERFORMANCE,
            '{} to {} MB for RSGCN on Tox21',
            lambda: peak_bytes(step_contenders.ON_DEVICE),
        ),
        (
            PERFORMANCE,
            'MB for RSGCN on Tox21, upstream {} to {}.',
            lambda: peak_bytes(step_contenders.UPSTREAM),
        ),
        (
            PERFORMANCE,
            'ours takes {} (RelGCN at 1,024) to {} times (RSGCN at 32: 47 MB) as much',
            lambda: answers.steps(of_qm9(stored('captured')), more_memory),
        ),
        (
            'docs/limits.md',
            "{} to {} times the memory of upstream's step",
            lambda: answers.steps(of_qm9(stored('captured')), more_memory),
        ),
        (PERFORMANCE, 'Upstream parses QM9 in every run, in {} to {} s', parsing_by_upstream),
        (
            PERFORMANCE,
            'training takes {} to {} s',
            lambda: [training for _, training in first_epochs_and_trainings()],
        ),
        (
            PERFORMANCE,
            'of which {} to {} is the first epoch',
            lambda: [first for first, _ in first_epochs_and_trainings()],
        ),
        (PERFORMANCE, 'there the GPU is busy {} to {} % of the time', lambda: busy(True)),
        (PERFORMANCE, 'with the other methods {} to {} %', lambda: busy(False)),
        (
            LEARNING,
            'The mean error of the gap is larger with all models, by {} to {} %',
            lambda: errors_of_packed('qm9 gap'),
        ),
        (PERFORMANCE, 'this saves {} to {} % of the device time of steps', savings_of_ggnn),
        (PERFORMANCE, 'in this table take {} to {} % less device time', savings_of_ggnn),
        (
            PERFORMANCE,
            'and {} to {} times as long as the products that they still need',
            over_products_of_ggnn,
        ),
        (PERFORMANCE, "upstream's steps on Tox21 take {} to {} times as long", of_slower_host),
        (PERFORMANCE, 'where the factors are {} to {}.', lambda: widths_over_upstream('widths')),
        (
            PERFORMANCE,
            'they are {} to {} in the second run',
            lambda: widths_over_upstream('widths_again'),
        ),
        (PERFORMANCE, 'where the first has {} to {}.', lambda: widths_over_upstream('widths')),
        (
            PERFORMANCE,
            'the time of chemprop divided by ours is {} to {} for a single seed',
            chemprop_over_ours,
        ),
    ],
)
def test_ranges_in_the_text(page, sentence, values):
    text = words_of(page)
    pattern = re.escape(sentence).replace(r'\{\}', r'(\d[\d.,]*)')
    (numbers,) = re.findall(pattern, text)
    ends = min(values()), max(values())
    for number, end in zip(numbers, ends):
        assert agrees(number, end), (number, end)


def test_where_the_switch_makes_a_step_longer():
    text = words_of(PERFORMANCE)
    (sentence,) = re.findall('longer on the device with the switch than without it: ([^.]*)', text)
    found = [
        ('widths', name, percent) for name, percent in re.findall(r'(\w+) by (\d+) %', sentence)
    ]
    assert [name for _, name, _ in found] == ['RSGCN', 'GIN', 'GGNN']
    (again,) = re.findall(r'\((\d+) % at commit', sentence)
    for run, name, percent in [*found, ('widths_again', 'GGNN', again)]:
        cell = stored(run)['data']['128'][name.lower()]['batches']['32']
        fp32, tf32 = device_times(cell)
        assert agrees(percent, 100 * (tf32 / fp32 - 1))


def test_how_far_jax_is_ahead_of_relgcn_in_tf32():
    text = words_of(PERFORMANCE)
    (percent,) = re.findall(r'With RelGCN in TF32 it is ahead by up to (\d+) %', text)
    ratios = [
        step_contenders.over_jax(cell, 'TF32', bench_widths.OURS['TF32'])
        for (_, method, _), cell in bench_widths.cells(stored('widths')['data'])
        if method == 'relgcn'
    ]
    assert agrees(percent, 100 - 100 * min(ratios))


def test_steps_of_nci():
    text = words_of(PERFORMANCE)
    pattern = (
        '([a-z]+) layers of (\\d+) units, ([\\d,]+) molecules of NCI take ([\\d.]+) ms in FP32 and '
        '([\\d.]+) ms in TF32, ([\\d.]+) and ([\\d.]+) times as long as their products'
    )
    ((layers, units, batch, *numbers),) = re.findall(pattern, text)
    result = stored('widths_nci')
    assert (layers, result['options']['layers']) == ('three', 3)
    cell = result['data'][units]['ggnn']['batches'][batch.replace(',', '')]
    for number, value in zip(numbers, [*device_times(cell), *over_products(cell)]):
        assert agrees(number, value)


NUMBERS = 'no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven'


@pytest.mark.parametrize(
    'page, sentence, arm',
    [
        (
            LEARNING,
            "{} of seven models do better than upstream's on Tox21",
            'folded to the largest',
        ),
        (README, 'better on Tox21 with {} of seven models', 'folded to the largest'),
        (METHODS, 'On Tox21 {} of seven models are better', 'folded to the largest'),
        (METHODS, 'On Tox21 {} of seven packed models have a better mean', 'packed'),
    ],
)
def test_number_of_models_that_do_better_on_tox21(page, sentence, arm):
    methods = stored('quality')['summary']['tox21'].values()
    assert len(methods) == 7
    n_better = sum(of[arm]['mean'] > of['dense']['mean'] for of in methods)
    text = words_of(page)
    assert text.count(sentence.format(NUMBERS[n_better])) == 1


def test_folded_models_learn_what_upstream_s_learn():
    """No mean of three seeds differs by more than the standard deviation of upstream's seeds."""
    for data, methods in stored('quality')['summary'].items():
        if data.startswith('all'):
            continue  # one seed
        for of in methods.values():
            difference = of['folded']['mean'] - of['dense']['mean']
            assert abs(difference) <= of['dense']['standard deviation']


def test_packed_models_that_learn_the_polarizability_worse():
    """RSGCN's mean is within the standard deviation of upstream's; GIN is worse in two seeds."""
    methods = stored('quality')['summary']['qm9 alpha']
    n_worse = {
        name: sum(
            ours > upstream
            for ours, upstream in zip(of['packed']['metrics'], of['dense']['metrics'])
        )
        for name, of in methods.items()
    }
    assert {name: n for name, n in n_worse.items() if n < 3} == {'rsgcn': 2, 'gin': 2}
    dense, packed = (methods['rsgcn'][arm] for arm in ('dense', 'packed'))
    assert packed['mean'] - dense['mean'] < dense['standard deviation']


def test_the_page_names_gpu_and_versions_of_the_results():
    text = words_of(PERFORMANCE)
    pattern = r'on one NVIDIA (\w+) \(141 GB, driver ([\d.]+), CUDA (\d+).(\d+), CuPy ([\d.]+)\)'
    (named,) = re.findall(pattern, text)
    for path in (harness.RESULTS / harness.GPU).glob('*.json'):
        of = json.loads(path.read_text())['conditions']
        cuda = str(of['cuda'] // 1000), str(of['cuda'] % 1000 // 10)
        found = of['gpu'].split()[-1], of['driver'], *cuda, '.'.join(of['cupy'].split('.')[:2])
        assert found == named, path.name


def test_device_times_of_two_runs():
    text = words_of(PERFORMANCE)
    (percent,) = re.findall(
        "Device times of the two runs differ by at most (\\d+) %, but for GGNN's", text
    )
    found = device_times_again().items()
    others = [each for (_, method), of in found if method != 'ggnn' for each in of]
    assert agrees(percent, max(map(abs, others)))


def test_number_of_cases_of_parity():
    text = words_of(README)
    assert 'of %d models and options' % len(stored('parity', True)['cases']) in text
