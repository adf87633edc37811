"""tools/mutants.py: the faults that it draws, the tests that it runs, and its verdicts."""

import json
import shutil

import pytest

from tests.examples.scripts import imported
from tests.support.processes import python, ROOT

TOOL = ROOT / 'tools' / 'mutants.py'
MODULE = 'chainer_bspmm/ops/double.py'
RUNS = 'from chainer_bspmm.ops.double import double\n\ndef test_it():\n    '


@pytest.fixture
def tool():
    return imported(TOOL.parent, TOOL.stem)


@pytest.fixture
def project(tmp_path):
    """Make the files of a checkout; return a function that adds some."""

    def add(**texts):
        for name, text in texts.items():
            path = tmp_path / (name.replace('__', '/') + '.py')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    (tmp_path / 'chainer_bspmm' / 'ops').mkdir(parents=True)
    (tmp_path / MODULE).write_text('def double(x):\n    y = x + x\n    return y\n')
    (tmp_path / 'pytest.ini').write_text('[pytest]\nmarkers = slow\n')
    return add


def names(root, paths):
    return [str(path.relative_to(root / 'tests')) for path in paths]


@pytest.fixture
def outcome(tool, project, monkeypatch):
    """Function of a test file's text: returns the tool's verdict on a fault of the module."""

    def find(program, line='y = x - x'):
        monkeypatch.setattr(
            tool, 'with_fault', lambda mutant, text: text.replace('y = x + x', line)
        )
        copy = project(tests__ops__test_double=program)
        before = (copy / MODULE).read_text()
        what, by, fault = tool.outcome(copy, tool.Mutant(MODULE, 'core/Sub', 0, 2, 8, 'y = x + x'))
        assert (copy / MODULE).read_text() == before
        return what, by, fault

    return find


@pytest.mark.slow
def test_a_fault_that_a_test_notices_is_found(outcome):
    by = 'tests/ops/test_double.py::test_it'
    assert outcome(RUNS + 'assert double(2) == 4\n') == ('found', by, 'y = x - x')


@pytest.mark.slow
def test_a_fault_that_only_another_process_runs_survives(outcome):
    call = 'import subprocess, sys; subprocess.run([sys.executable, "-c", %r])\n'
    program = RUNS + call % 'from chainer_bspmm.ops.double import double; double(2)'
    assert outcome(program) == ('survived', '', 'y = x - x')


@pytest.mark.slow
def test_a_fault_that_no_test_runs_is_undetermined(outcome):
    assert outcome(RUNS + 'pass\n') == ('undetermined', 'no test runs it', 'y = x - x')


@pytest.mark.parametrize(
    'ends, what, by',
    [
        ([(1, 'FAILED t.py::test[a b] - no'), (0, '')], 'found', 't.py::test[a b]'),
        ([(0, ''), (1, 'FAILED t.py::test'), (0, '')], 'found', 't.py::test'),
        ([(5, ''), (1, 'FAILED t.py::test'), (0, '')], 'found', 't.py::test'),
        ([(2, 'ERROR t.py - SyntaxError'), (0, '')], 'found', 't.py'),
        ([(2, 'ERROR t.py'), (2, '')], 'undetermined', 'without the fault as well: t.py'),
        ([(1, 'FAILED t.py::a'), (1, '')], 'undetermined', 'without the fault as well: t.py::a'),
        ([(-11, ''), (0, '')], 'found', 'exit status -11'),
        ([(None, ''), (0, '')], 'found', 'no end'),
        ([(4, ''), (4, '')], 'undetermined', 'without the fault as well: exit status 4'),
    ],
    ids=[
        'of its name', 'neighbour', 'no test of its name', 'import', 'import anyway', 'anyway',
        'crash', 'no end', 'no environment',
    ],
)  # fmt: skip
def test_an_outcome_depends_on_how_tests_end(tool, project, outcome, monkeypatch, ends, what, by):
    project(tests__ops__test_other='')
    left = iter(ends)
    monkeypatch.setattr(tool, 'run', lambda copy, tests, *options: next(left))
    assert outcome('') == (what, by, 'y = x - x')
    assert not list(left)


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
    lines = [line.strip() for line in tool.with_mark(PROGRAM, place, 'mark').splitlines()]
    mark = lines.index("__import__('os')._exit(1)")
    assert lines[mark - 1 : mark + 2] == ["open('mark', 'w').close()", lines[mark], before]


def test_a_mark_of_a_decorator_is_before_it(tool):
    text = 'x = 1\n@f(1)\ndef g():\n    pass\n'
    lines = tool.with_mark(text, (2, 0), 'mark').replace('\n\n', '\n').splitlines()
    assert lines[1:4] == ["open('mark', 'w').close()", "__import__('os')._exit(1)", '@f(1)']


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
