"""Draw faults of the Python code at random, and run the tests that should notice them.

    python tools/mutants.py [--seed 0] [--number 100] [--jobs 1] [--results FILE]

The faults are cosmic-ray's: it can list all of them and apply a single one, while mutmut rewrites
a package as a whole and offers no draw. Every fault of chainer_bspmm/ and examples/common/ is as
likely as any other. A draw depends on the seed alone, and a larger one contains a smaller one.

A fault is planted in a copy of the checkout, never in the checkout. The tests run that have the
file's name, then the other tests of its folder, then those of the files that import it; none of
them is marked slow. What happens to the fault:

found         a test fails that passes without the fault, or no end is reached in time
survived      all tests pass, and one of them runs the statement
undetermined  no test runs the statement, as it is with code for a GPU where there is none;
              or the test that fails does so without the fault as well

Docstrings have no faults. Annotations and what stands under ``if TYPE_CHECKING`` are left out,
because nothing runs them. Each fault is stored as a line of JSON once its tests have run, and a
fault that is stored is not repeated: an interrupted run can continue, and survivors can be tried
again when their lines are deleted. Run `make test` first: it should pass.
"""

import argparse
import ast
import collections
import functools
import hashlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = 'chainer_bspmm', 'examples/common'
LEFT_OUT = '.git', '.venv*', '.*_cache', '.hypothesis', '__pycache__', 'build', 'dist', 'site'
SECONDS = 1800  # of all tests of a stage
PASSED, NO_TEST, ENDLESS = 0, 5, None  # exit status of pytest


class Mutant(typing.NamedTuple):
    """A fault: cosmic-ray's name for it, and where it is."""

    file: str
    operator: str
    occurrence: int
    line: int
    column: int
    text: str  # of the line, without the fault

    @property
    def key(self):
        return self.file, self.operator, self.occurrence, self.text


def position(node):
    """Return where a node of Python's syntax begins and ends, with its decorators."""
    line = min(part.lineno for part in [node, *getattr(node, 'decorator_list', [])])
    return (line, node.col_offset), (node.end_lineno, node.end_col_offset)


def never_run(tree):
    """Yield the nodes of a module that only a type checker reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING':
            yield from (node.test, *node.body)
        for name in ('annotation', 'returns'):
            if getattr(node, name, None) is not None:
                yield getattr(node, name)


@functools.lru_cache(maxsize=None)
def operators():
    """Return cosmic-ray's operators by name, except those that need arguments."""
    from cosmic_ray import plugins

    classes = {name: plugins.get_operator(name) for name in plugins.operator_names()}
    return {name: cls() for name, cls in classes.items() if not cls.arguments()}


def mutants(root, file):
    """Yield all faults of a file."""
    from cosmic_ray.ast import ast_nodes, get_ast

    text = (root / file).read_text(encoding='utf-8')
    lines = text.splitlines()
    ignored = [position(node) for node in never_run(ast.parse(text))]
    n_found = collections.Counter()
    for node in ast_nodes(get_ast(text)):
        for name, operator in operators().items():
            for place, _ in operator.mutation_positions(node):
                if not any(begin <= place < end for begin, end in ignored):
                    line, column = place
                    yield Mutant(file, name, n_found[name], line, column, lines[line - 1].strip())
                n_found[name] += 1


def with_fault(mutant, text):
    """Return the text of a file with a fault."""
    from cosmic_ray.mutating import mutate_code

    return mutate_code(text, operators()[mutant.operator], mutant.occurrence)


def drawn(root, seed, number):
    """Return some faults of all files: the same until the files change."""

    def lot(mutant):
        return hashlib.sha256(repr((seed, *mutant[:3])).encode()).digest()

    paths = [path for folder in SOURCES for path in (root / folder).rglob('*.py')]
    every = (mutant for path in paths for mutant in mutants(root, str(path.relative_to(root))))
    return sorted(every, key=lot)[:number]


def module_name(file):
    """Return the dotted name by which a file is imported, without `examples`."""
    parts = pathlib.PurePath(file).with_suffix('').parts
    return '.'.join(part for part in parts if part not in ('examples', '__init__'))


def imports(path):
    """Return the dotted names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f'{node.module}.{alias.name}' for alias in node.names}
    return names


def importers(root, file, *folders):
    """Return the files of some folders that import a file."""
    name = module_name(file)
    paths = [path for folder in folders for path in sorted((root / folder).rglob('*.py'))]
    return [
        path
        for path in paths
        if any(found == name or found.startswith(name + '.') for found in imports(path))
    ]


def folder_of_tests(root, file):
    """Return the folder of `tests/` that mirrors a file's."""
    first = pathlib.PurePath(file).parts[:2]
    if first[0] == 'examples':
        return root / 'tests' / 'examples'
    return root / 'tests' / ('' if first[1].endswith('.py') else first[1])


def mirrors(root, file):
    """Return the test files that have the name of a file, or one that contains it."""
    name = module_name(file).split('.')[-1]
    return sorted(folder_of_tests(root, file).glob(f'test_*{name}*.py'))


def neighbours(root, file):
    """Return the other tests of a file's folder, and those of the files that import it."""
    name = re.compile(r'\b%s\b' % module_name(file).split('.')[-1])
    tests = sorted(
        folder_of_tests(root, file).glob('test_*.py'),
        key=lambda path: -len(name.findall(path.read_text(encoding='utf-8'))),
    )
    tests += [path for path in importers(root, file, 'tests') if path.name.startswith('test_')]
    for path in importers(root, file, *SOURCES):
        tests += mirrors(root, path.relative_to(root))
    before = mirrors(root, file)
    return [path for path in dict.fromkeys(tests) if path not in before]


def run(copy, tests, *options):
    """Run tests in a copy; return the exit status of pytest and what it printed."""
    words = [sys.executable, '-m', 'pytest', '-q', '-m', 'not slow', '-p', 'no:cacheprovider']
    process = subprocess.Popen(
        [*words, '--hypothesis-seed=0', *options, *map(str, tests)],
        cwd=copy,
        env={**os.environ, 'PYTHONPATH': str(copy), 'OPENBLAS_NUM_THREADS': '1'},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=SECONDS)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        return ENDLESS, ''
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with all that the tests have started
        except ProcessLookupError:
            pass


def write(path, text):
    """Replace a file, and forget what Python compiled of it."""
    path.write_text(text, encoding='utf-8')
    # Python takes it for current if size and second of the change are the same.
    pathlib.Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def with_mark(text, place, mark):
    """Return a program that creates a file and ends where it comes to the statement at a place."""
    tree = ast.parse(text)
    for node in ast.walk(tree):  # the innermost statement comes last
        for statements in vars(node).values():
            for i, statement in enumerate(statements if isinstance(statements, list) else ()):
                if isinstance(statement, ast.stmt):
                    begin, end = position(statement)
                    if begin <= place < end:
                        block, index = statements, i
    # No name is bound here: that would hide another one of the function.
    mark = ast.parse(f"open({str(mark)!r}, 'w').close(); __import__('os')._exit(1)")
    block[index:index] = mark.body
    return ast.unparse(ast.fix_missing_locations(tree))


def is_run(copy, mutant, tests):
    """Tell whether tests run the statement in which a fault is."""
    path = copy / mutant.file
    text = path.read_text(encoding='utf-8')
    mark = copy / 'mark'
    mark.unlink(missing_ok=True)
    write(path, with_mark(text, (mutant.line, mutant.column), mark))
    try:
        run(copy, tests)
    finally:
        write(path, text)
    return mark.exists()


def outcome(copy, mutant):
    """Run the tests of a fault; return what became of it, the reason, and the line with it."""
    path = copy / mutant.file
    text = path.read_text(encoding='utf-8')
    fault = with_fault(mutant, text)
    line = fault.splitlines()[mutant.line - 1].strip()
    stages = [mirrors(copy, mutant.file), neighbours(copy, mutant.file)]
    for tests in filter(None, stages):
        write(path, fault)
        try:
            status, printed = run(copy, tests, '-x')
        finally:
            write(path, text)
        if status not in (PASSED, NO_TEST):
            failed = re.search(r'^(?:FAILED|ERROR) (.+?)(?: - .*)?$', printed, re.MULTILINE)
            if failed is not None:
                reason = failed[1]
                again, _ = run(copy, [reason])
            else:  # a crash, a hang, or pytest does not even start
                reason = 'no end' if status is ENDLESS else f'exit status {status}'
                again, _ = run(copy, tests, '--collect-only')
            if again not in (PASSED, NO_TEST):
                return 'undetermined', f'without the fault as well: {reason}', line
            return 'found', reason, line
    if is_run(copy, mutant, stages[0] + stages[1]):
        return 'survived', '', line
    return 'undetermined', 'no test runs it', line


def tried(folder, mutant):
    """Try a fault in the copy of this process; return what is stored of it."""
    copy = folder / str(os.getpid())
    if not copy.exists():
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    start = time.monotonic()
    what, reason, line = outcome(copy, mutant)
    seconds = round(time.monotonic() - start, 1)
    return {**mutant._asdict(), 'fault': line, 'outcome': what, 'by': reason, 'seconds': seconds}


def stored(path):
    """Return the lines of a file of results by their faults' keys."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Mutant(*[row[name] for name in Mutant._fields]).key: row for row in rows}


def describe(row):
    """Return the line that tells of an outcome."""
    text = f'{row["outcome"]}: {row["file"]}:{row["line"]}: {row["text"]}  ->  {row["fault"]}'
    return f'{text}  ({row["by"]})' if row['by'] else text


def summary(rows):
    """Return the faults that were not found, and how many of each outcome there are."""
    n = collections.Counter(row['outcome'] for row in rows)
    determined = n['found'] + n['survived']
    counts = [f'{n[name]} {name}' for name in ('found', 'survived', 'undetermined')]
    share = f'; found of those determined: {n["found"] / determined:.1%}' if determined else ''
    left = sorted(describe(row) for row in rows if row['outcome'] != 'found')
    return '\n'.join([*left, ', '.join(counts) + share])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--number', type=int, default=100, help='of faults')
    parser.add_argument('--jobs', type=int, default=1, help='how many are tried at once')
    parser.add_argument('--results', type=pathlib.Path, help='default: .cache/mutants-SEED.jsonl')
    args = parser.parse_args(arguments)
    results = args.results or ROOT / '.cache' / f'mutants-{args.seed}.jsonl'
    results.parent.mkdir(exist_ok=True)
    # A fault may ask for any amount of memory. Sanitizers cannot run with a limit.
    pathlib.Path('/proc/self/oom_score_adj').write_text('1000')  # the first to be ended

    draw = drawn(ROOT, args.seed, args.number)
    done = stored(results)
    left = [mutant for mutant in draw if mutant.key not in done]
    print(f'{len(draw)} faults, {len(draw) - len(left)} of them in {results}', flush=True)
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Pool(args.jobs) as pool:
        attempt = functools.partial(tried, pathlib.Path(folder))
        try:
            for row in pool.imap_unordered(attempt, left):
                with results.open('a') as file:
                    print(json.dumps(row), file=file)
                print(describe(row), flush=True)
        except KeyboardInterrupt:
            print('interrupted: the same command continues')
    done = stored(results)
    print(summary([done[mutant.key] for mutant in draw if mutant.key in done]))


if __name__ == '__main__':
    main()
