"""Layout of the tests: no test file imports from another."""

import ast
import pathlib

TESTS = pathlib.Path(__file__).resolve().parent


def imported(path):
    """Yield the dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ('%s.%s' % (node.module or '', alias.name) for alias in node.names)


def test_no_import_from_a_test_file():
    files = {path.stem for path in TESTS.rglob('test_*.py')}
    found = {
        str(path.relative_to(TESTS)): name
        for path in sorted(TESTS.rglob('test_*.py'))
        for name in imported(path)
        if files & set(name.split('.'))
    }
    assert not found, 'code that several test files use belongs in tests/support'
