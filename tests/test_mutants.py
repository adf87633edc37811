"""tools/mutants.py: its faults, the tests that it runs, and its verdicts."""

import json
import shutil

import pytest

from tests.examples.scripts import imported
from tests.support.processes import python, ROOT

TOOL = ROOT / 'tools' / 'mutants.py'
MODULE = 'chainer_bspmm/ops/double.py'
TEST = 'tests/ops/test_double.py'
MUTANT = MODULE, 'core/Sub', 0, 2, 8, 'y = x + x'
RUNS = 'from chainer_bspmm.ops.double import double\n\ndef test_it():\n    '


@pytest.fixture
def tool():
    return imported(TOOL.parent, TOOL.stem)


@pytest.fixture
def project(tmp_path):
    """Function that adds files to a small checkout."""

    root = tmp_path / 'checkout'  # copies are made beside this

    def add(**texts):
        for name, text in texts.items():
            path = root / (name.replace('__', '/') + '.py')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    (root / 'chainer_bspmm' / 'ops').mkdir(parents=True)
    (root / MODULE).write_text('def double(x):\n    y = x + x\n    return y\n')
    (root / 'pytest.ini').write_text('[pytest]\nmarkers = slow\n')
    return add


def names(root, paths):
    return [str(path.relative_to(root / 'tests')) for path in paths]


@pytest.fixture
def outcome(tool, project, monkeypatch):
    """Function from the text of a test file to the tool's verdict on a fault of the module.

    tests: test file -> tests that run the module.
    """

    def find(program, tests):
        monkeypatch.setattr(
            tool, 'with_fault', lambda mutant, text: text.replace('y = x + x', 'y = x - x')
        )
        copy = project(tests__ops__test_double=program)
        before = (copy / MODULE).read_text()
        what, by, fault = tool.outcome(copy, tool.Mutant(*MUTANT), tests)
        assert (copy / MODULE).read_text() == before and fault == 'y = x - x'
        return what, by

    return find


@pytest.mark.slow
def test_a_fault_that_a_test_notices_is_found(outcome):
    tests = {TEST: [TEST + '::test_it']}
    assert outcome(RUNS + 'assert double(2) == 4\n', tests) == ('found', TEST + '::test_it')


@pytest.mark.slow
def test_a_fault_that_tests_run_and_do_not_notice_survives(outcome):
    assert outcome(RUNS + 'double(2)\n', {TEST: [TEST + '::test_it']}) == ('survived', '')


def test_a_fault_that_no_test_runs_is_undetermined(outcome):
    assert outcome(RUNS + 'pass\n', {}) == ('undetermined', 'no test runs it')


@pytest.mark.parametrize(
    'ends, what, by',
    [
        ([(1, 'FAILED t.py::test[a b] - no'), (0, '')], 'found', 't.py::test[a b]'),
        ([(0, ''), (1, 'FAILED t.py::test'), (0, '')], 'found', 't.py::test'),
        ([(5, ''), (0, ''), (1, 'FAILED t.py::test'), (0, '')], 'found', 't.py::test'),
        ([(2, 'ERROR t.py - SyntaxError'), (0, '')], 'found', 't.py'),
        ([(2, 'ERROR t.py'), (2, '')], 'undetermined', 'without the fault as well: t.py'),
        ([(1, 'FAILED t.py::a'), (1, '')], 'undetermined', 'without the fault as well: t.py::a'),
        ([(1, 'FAILED t.py::a[3]'), (4, ''), (0, '')], 'found', 't.py::a[3]'),
        ([(-11, ''), (0, '')], 'found', 'exit status -11'),
        ([(None, ''), (0, '')], 'found', 'no end'),
        ([(4, ''), (4, '')], 'undetermined', 'without the fault as well: exit status 4'),
        ([(0, ''), (0, ''), (0, '')], 'survived', ''),
    ],
    ids=[
        'test that runs it', 'file of its name', 'neighbour', 'import', 'import anyway', 'anyway',
        'name of its case', 'crash', 'no end', 'no environment', 'not noticed',
    ],
)  # fmt: skip
def test_an_outcome_depends_on_how_tests_end(tool, project, outcome, monkeypatch, ends, what, by):
    project(tests__ops__test_other='')
    left = iter(ends)
    monkeypatch.setattr(tool, 'run', lambda copy, tests, *options: next(left))
    tests = {TEST: [TEST + '::test_it'], 'tests/ops/test_other.py': []}
    assert outcome('', tests) == (what, by)
    assert not list(left)


@pytest.fixture
def stages(tool, project):
    """Function from the tests that run the module to the stages, with paths of a checkout."""

    def of(tests):
        root = project(tests__ops__test_double='', tests__ops__test_a='', tests__ops__test_b='')
        lists = tool.stages(root, tool.Mutant(*MUTANT), tests)
        return [
            [each if isinstance(each, str) else names(root, [each])[0] for each in tests]
            for tests in lists
        ]

    return of


def test_tests_that_run_a_fault_come_first_then_the_files_that_do(stages):
    tests = {'tests/ops/test_b.py': ['b'], TEST: ['x', 'y']}
    assert stages(tests) == [['x', 'y'], ['ops/test_double.py'], ['ops/test_b.py'], []]


def test_neighbours_come_first_if_no_test_of_its_name_runs_a_fault(stages):
    tests = {'tests/ops/test_b.py': ['b'], 'tests/ops/test_a.py': ['a']}
    assert stages(tests) == [['a', 'b'], [], ['ops/test_a.py', 'ops/test_b.py'], []]


def test_tests_of_other_files_come_last(stages):
    tests = {'tests/links/test_layer.py': ['c'], TEST: ['x']}
    assert stages(tests) == [['x'], ['ops/test_double.py'], [], ['c']]


def test_other_files_are_all_there_is_if_neither_its_own_nor_neighbours_run_a_fault(stages):
    tests = {'tests/links/test_layer.py': ['c'], 'tests/test_info.py': []}
    assert stages(tests) == [['c'], [], [], ['links/test_layer.py', 'test_info.py']]


@pytest.mark.parametrize('n', [39, 40, 41, 1000])
def test_a_sample_of_many_tests_is_small_and_from_first_to_last(tool, stages, n):
    every = [str(i) for i in range(n)]
    sample, *_ = stages({TEST: every})
    assert sample == every[:: int(sample[1])]
    assert tool.SAMPLE / 2 - 1 <= len(sample) <= tool.SAMPLE


@pytest.mark.slow
def test_slow_tests_are_left_out(tool, project):
    slow = 'import pytest\npytestmark = pytest.mark.slow\n'
    copy = project(tests__ops__test_double=slow + RUNS + 'assert False\n')
    status, _ = tool.run(copy, ['tests/ops/test_double.py'])
    assert status == tool.NO_TEST


def test_tests_are_stopped_when_their_time_is_over(tool, project, monkeypatch):
    monkeypatch.setattr(tool, 'SECONDS', 1)
    copy = project(tests__ops__test_double='while True: pass\n')
    assert tool.run(copy, ['tests/ops/test_double.py']) == (tool.ENDLESS, '')


def test_neighbours_are_of_the_folder_and_of_importers(tool, project):
    root = project(
        chainer_bspmm__links__layer='from chainer_bspmm.ops.double import double\n',
        chainer_bspmm__links__other='from chainer_bspmm.ops import triple\n',
        tests__ops__test_double='',
        tests__ops__test_double_rows='',
        tests__ops__test_early='',
        tests__ops__test_late='double = None\n',
        tests__links__test_layer='',
        tests__links__test_other='',
        tests__training__test_step='from chainer_bspmm.ops import double\n',
        tests__training__helper='from chainer_bspmm.ops import double\n',
    )
    assert names(root, tool.mirrors(root, MODULE)) == [
        'ops/test_double.py',
        'ops/test_double_rows.py',
    ]
    assert names(root, tool.neighbours(root, MODULE)) == [
        'ops/test_late.py',  # names the module in its text
        'ops/test_early.py',
        'training/test_step.py',
        'links/test_layer.py',
    ]


@pytest.mark.parametrize(
    'file, test',
    [
        ('chainer_bspmm/info.py', 'test_info.py'),
        ('chainer_bspmm/ops/graph_linear/host.py', 'ops/test_host.py'),
        ('chainer_bspmm/ops/graph_linear/__init__.py', 'ops/test_graph_linear.py'),
        ('examples/common/ranks.py', 'examples/test_ranks.py'),
    ],
)
def test_the_tests_of_a_files_name_are_in_the_mirrored_folder(tool, project, file, test):
    root = project(
        tests__test_info='',
        tests__ops__test_host='',
        tests__ops__test_graph_linear='',
        tests__examples__test_ranks='',
        tests__links__test_host='',
    )
    assert names(root, tool.mirrors(root, file)) == [test]


PROGRAM = """
import os
def f(x):
    if x == 1:
        os = 1
    elif x == 2:
        return [
            x + 1
        ]
    try:
        x = 3
    except ValueError:
        x = 4
"""


MARK = "__import__('mutants_marks').reached(%d)"


@pytest.mark.parametrize(
    'place, before',
    [
        ((4, 9), 'if x == 1:'),
        ((5, 13), 'os = 1'),
        ((6, 11), 'if x == 2:'),
        ((8, 14), 'return [x + 1]'),
        ((13, 12), 'x = 4'),
    ],
)
def test_a_mark_is_before_the_innermost_statement(tool, place, before):
    lines = [line.strip() for line in tool.with_marks(PROGRAM, {7: place}).splitlines()]
    assert lines[lines.index(MARK % 7) + 1] == before


def test_a_mark_of_a_decorator_is_before_it(tool):
    text = 'x = 1\n@f(1)\ndef g():\n    pass\n'
    lines = tool.with_marks(text, {0: (2, 0)}).replace('\n\n', '\n').splitlines()
    assert lines[1:3] == [MARK % 0, '@f(1)']


def test_several_marks_of_a_file_are_each_before_their_own_statement(tool):
    text = 'x = 1\ny = 2\n'
    marked = tool.with_marks(text, {3: (2, 4), 4: (1, 0), 5: (2, 0)})
    assert marked.splitlines() == [MARK % 4, 'x = 1', MARK % 3, MARK % 5, 'y = 2']


CALL = 'import subprocess, sys; subprocess.run([sys.executable, "-c", %r])\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    'program, found',
    [
        (RUNS + 'double(2)\n', {1: [TEST + '::test_it']}),
        (RUNS + 'pass\n', {}),
        (RUNS + CALL % (RUNS[: RUNS.index('\n')] + '; double(2)'), {1: [TEST + '::test_it']}),
        (RUNS.replace('\n\n', '; double(2)\n\n') + 'pass\n', {1: []}),
        (RUNS + 'double(2)\n    assert double(3) == 7\n', {1: [TEST + '::test_it']}),
    ],
    ids=['test', 'no test', 'process', 'import', 'test that fails'],
)
def test_marks_show_which_tests_run_a_statement(tool, project, program, found):
    root = project(tests__ops__test_double=program, chainer_bspmm__other='x = 1\n')
    draw = [tool.Mutant('chainer_bspmm/other.py', '', 0, 1, 0, ''), tool.Mutant(*MUTANT)]
    assert tool.reached(root, draw, TEST) == (TEST, found)


@pytest.fixture
def marked(tool, project, monkeypatch, tmp_path_factory):
    """Function that asks for the tests of a fault, and returns them and the files that were run."""
    path = tmp_path_factory.mktemp('results') / 'marks.jsonl'
    runs = []

    def reached(root, draw, file):
        runs.append(file)
        return file, {0: [file + '::test']} if 'other' not in file else {}

    monkeypatch.setattr(tool, 'reached', reached)

    def ask(*mutant):
        del runs[:]
        tests = tool.all_reached(project(), [tool.Mutant(*(mutant or MUTANT))], path, map)
        return tests[0], list(runs)

    project(tests__ops__test_double='', tests__ops__test_other='')
    return ask


OTHER = 'tests/ops/test_other.py'
REACHED = {TEST: [TEST + '::test']}


def test_files_that_do_not_run_a_fault_are_no_part_of_its_tests(marked):
    assert marked() == (REACHED, [TEST, OTHER])


def test_marks_are_not_repeated(marked):
    marked()
    assert marked() == (REACHED, [])


def test_marks_are_repeated_for_a_test_file_that_changed(marked, project):
    marked()
    project(tests__ops__test_other='x = 1\n')
    assert marked() == (REACHED, [OTHER])


@pytest.mark.parametrize(
    'file', ['chainer_bspmm__ops__double', 'tests__support', 'tests__conftest']
)
def test_marks_are_repeated_if_what_tests_share_changes(marked, project, file):
    marked()
    project(**{file: 'x = 1\n'})
    assert marked() == (REACHED, [TEST, OTHER])


def test_marks_are_repeated_for_another_draw(marked):
    marked()
    assert marked(MODULE, 'core/Add', *MUTANT[2:]) == (REACHED, [TEST, OTHER])


def test_a_copy_shares_what_compilers_made(tool, project, monkeypatch, tmp_path_factory):
    root = project()
    monkeypatch.setattr(tool, 'ROOT', root)
    copy = tool.new_copy(root, tmp_path_factory.mktemp('copies') / 'copy')
    (copy / '.cache' / 'compiled').write_text('')
    assert (root / '.cache' / 'compiled').exists()


@pytest.fixture
def many(tool, monkeypatch):
    def mutants(root, file):
        for i in range(100):
            yield tool.Mutant(file, 'core/AddNot', i, i, 0, '')

    monkeypatch.setattr(tool, 'mutants', mutants)


def test_a_larger_draw_contains_a_smaller_one(tool, project, many):
    root = project()
    assert tool.drawn(root, 0, 20)[:10] == tool.drawn(root, 0, 10)


def test_another_seed_draws_others(tool, project, many):
    root = project()
    assert tool.drawn(root, 0, 10) != tool.drawn(root, 1, 10)


def test_a_draw_is_of_the_package_and_what_examples_share(tool, project, many):
    root = project(examples__common__data='', examples__qm9__train='', tests__ops__test_double='')
    assert {mutant.file for mutant in tool.drawn(root, 0, 400)} == {
        MODULE,
        'examples/common/data.py',
    }


def test_a_summary_lists_what_was_not_found(tool):
    rows = [
        dict(file='a.py', line=i, text='x + y', fault='x - y', outcome=outcome, by=by)
        for i, (outcome, by) in enumerate(
            [
                ('found', 'test_a'),
                ('survived', ''),
                ('undetermined', 'no test runs it'),
                ('found', 'test_b'),
            ]
        )
    ]
    assert tool.summary(rows).splitlines() == [
        'survived: a.py:1: x + y  ->  x - y',
        'undetermined: a.py:2: x + y  ->  x - y  (no test runs it)',
        '2 found, 1 survived, 1 undetermined; found of those determined: 66.7%',
    ]


def test_annotations_and_imports_for_type_checkers_have_no_faults(tool, project):
    pytest.importorskip('cosmic_ray')
    text = """
        if TYPE_CHECKING:
            x = 1
        y: int | None = 2
        def f(a: int | None = 3) -> int | None:
            return a | 4
        """
    root = project(chainer_bspmm__annotated=text.replace('\n        ', '\n'))
    found = {
        (mutant.line, mutant.column) for mutant in tool.mutants(root, 'chainer_bspmm/annotated.py')
    }
    assert found == {(4, 16), (5, 22), (6, 13), (6, 15)}


@pytest.mark.parametrize(
    'operator, identity', [('==', 'x is y'), ('!=', 'x is not y')], ids=['equal', 'unequal']
)
def test_identity_is_no_fault_of_a_comparison_for_equality(tool, project, operator, identity):
    pytest.importorskip('cosmic_ray')
    text = f'x {operator} y\n'
    root = project(chainer_bspmm__compared=text)
    faults = {
        tool.with_fault(mutant, text).strip()
        for mutant in tool.mutants(root, 'chainer_bspmm/compared.py')
    }
    every = {'==', '!=', '<', '<=', '>', '>=', 'is', 'is not'}
    assert faults == {f'x {each} y' for each in every - {operator}} - {identity}


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_interrupted(project):
    pytest.importorskip('cosmic_ray')
    root = project(tests__ops__test_double=RUNS + 'assert double(2) == 4\n')
    (root / 'tools').mkdir()
    script = shutil.copy(TOOL, root / 'tools')
    results = root / 'results.jsonl'

    def command(number):
        return python(script, '--number', number, '--results', results).stdout.splitlines()

    first = command(2)
    assert first[0] == f'2 faults, 0 of them in {results}'
    second = command(3)
    assert second[0] == f'3 faults, 2 of them in {results}'
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len({row['operator'] for row in rows}) == 3
    assert second[-1].startswith(
        f'{len([row for row in rows if row["outcome"] == "found"])} found,'
    )
