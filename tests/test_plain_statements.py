"""tools/plain_statements.py: statements that it refuses, and statements that it allows."""

import textwrap

import pytest

from tests.examples.scripts import imported
from tests.support.processes import python, ROOT

TOOL = ROOT / 'tools' / 'plain_statements.py'
PART_OF_A_CALL = 'write these arguments into their call'
UNLIKE = 'these values are not alike: give each an assignment'
LAMBDA = 'this lambda has a name: make it a function'


def refused(text):
    return imported(TOOL.parent, TOOL.stem).refused(textwrap.dedent(text))


@pytest.mark.parametrize(
    'name, call',
    [
        ('words = "-m", "pytest"', 'python(*words)'),
        ('options = {"check": True}', 'python("-m", **options)'),
        ('options = {"check": True}', 'self.process.python(**options)'),
    ],
)
def test_a_name_for_a_part_of_one_call_is_refused(name, call):
    text = f"""
        def work(self):
            {name}
            return {call}
        """
    assert refused(text) == [(3, PART_OF_A_CALL)]


@pytest.mark.parametrize(
    'text',
    [
        """
        def used_twice():
            words = '-m', 'pytest'
            print(words)
            return python(*words)
        """,
        """
        def launched():
            sizes = n_rows, n_channels
            run('bspmm', y, plan, *sizes)
            kernel(*sizes)
        """,
        """
        def no_literal():
            words = arguments()
            return python(*words)
        """,
    ],
    ids=['used twice', 'a launch', 'no literal'],
)
def test_other_names_may_be_unpacked(text):
    assert refused(text) == []


@pytest.mark.parametrize(
    'assignment',
    [
        'found, start = {}, clock()',
        'n, labels = len(x), x.labels',
        'first, rest = x[0], x[1:]',
        'self.x, self.y = x, None',
    ],
)
def test_values_that_are_not_alike_are_refused(assignment):
    assert refused(f'x = 1\n{assignment}\n') == [(2, UNLIKE)]


@pytest.mark.parametrize(
    'assignment',
    [
        'x, y = point.x, point.y',
        'n, m = len(x), len(y)',
        'name, value, is_done = "a", 1, False',
        'a[i], b = b, a[i]',
        'x, y = y, x + y',
        'first, *rest = x, *f(y)',
        'height, width = x.shape',
    ],
)
def test_other_assignments_may_have_several_names(assignment):
    assert refused(assignment) == []


@pytest.mark.parametrize(
    'assignment',
    ['double = lambda x: 2 * x', 'double, half = (lambda x: 2 * x), (lambda x: 0.5 * x)'],
)
def test_a_lambda_with_a_name_is_refused(assignment):
    assert refused(assignment) == [(1, LAMBDA)]


def test_other_lambdas_are_allowed():
    text = """
        numbers.sort(key=lambda x: -x)
        makers = {'zero': lambda: 0}
        self.double = lambda x: 2 * x
        """
    assert refused(text) == []


def test_the_command_names_each_place_in_its_folders(tmp_path):
    path = tmp_path / 'package' / 'module.py'
    path.parent.mkdir()
    path.write_text('x = 1\ny, z = x, None\ndouble = lambda x: 2 * x\n')
    done = python(TOOL, tmp_path, status=1)
    assert done.stdout == f'{path}:2: {UNLIKE}\n{path}:3: {LAMBDA}\n'


def test_the_command_is_silent_about_plain_statements(tmp_path):
    (tmp_path / 'module.py').write_text('x = 1\n')
    assert python(TOOL, tmp_path, status=0).stdout == ''
