"""Draw faults of the Python code at random, and run the tests that should notice them.

    python tools/mutants.py [--seed 0] [--number 100] [--jobs 1] [--results FILE]

The faults are cosmic-ray's: it can list all of them and apply a single one, while mutmut rewrites
a package as a whole and offers no draw. Every fault of chainer_bspmm/ and examples/common/ is as
likely as any other. A draw depends on the seed alone, and a larger one contains a smaller one.

Faults are planted in a copy of the checkout, never in the checkout itself. Tests that are marked
slow do not run. Before anything is planted, each test file that may concern a fault runs once,
alone, with a mark in the statement of every fault. The marks show which tests run which statement;
test files that do not run the statement of a fault are not used for it. The others run in this
order, until one fails: some of the very tests that run the statement; the test files that have the
name of the faulty file; the other test files of their folder, and of the files that import the
faulty one; some tests of all other files. The outcome for the fault:

found         a test fails that passes without the fault, or no end is reached in time
survived      all tests pass, and one of them runs the statement
undetermined  no test runs the statement, such as code for a GPU on a machine without one;
              or the test that fails also fails without the fault

Docstrings have no faults. Left out are annotations and statements under ``if TYPE_CHECKING``,
because nothing runs them, and `is` for ``==`` and `is not` for ``!=``: of small numbers, names and
types these are the same program, and where they differ depends on which equal objects this version
of Python shares. The opposites, `is not` for ``==`` and `is` for ``!=``, are drawn.

Each fault is stored as a line of JSON once its tests have run, and a fault that is stored is not
repeated: an interrupted run can continue, and survivors can be tried again when their lines are
deleted. What the marks showed is stored beside it, and holds until the package, a test file or the
draw changes. Run `make test` first: it should pass.
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
LEFT_OUT = (
    '.git', '.venv*', '.cache', '.*_cache', '.hypothesis', '__pycache__', 'build', 'dist', 'site',
)  # fmt: skip
SECONDS = 1800  # of all tests of a stage
SAMPLE = 40  # tests that run a fault's statement, before whole files
PASSED, UNKNOWN, NO_TEST, ENDLESS = 0, 4, 5, None  # exit status of pytest
IDENTITY_FOR_EQUALITY = (
    'core/ReplaceComparisonOperator_Eq_Is', 'core/ReplaceComparisonOperator_NotEq_IsNot',
)  # fmt: skip


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
    """Return the begin and the end of a node of Python's syntax, decorators included."""
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
    """Return cosmic-ray's operators by name, without those that are left out or need arguments."""
    from cosmic_ray import plugins

    names = [name for name in plugins.operator_names() if name not in IDENTITY_FOR_EQUALITY]
    classes = {name: plugins.get_operator(name) for name in names}
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
    """Draw some faults from all files; the draw stays the same until the files change."""

    def lot(mutant):
        return hashlib.sha256(repr((seed, *mutant[:3])).encode()).digest()

    paths = [path for folder in SOURCES for path in (root / folder).rglob('*.py')]
    every = (mutant for path in paths for mutant in mutants(root, str(path.relative_to(root))))
    return sorted(every, key=lot)[:number]


def module_name(file):
    """Return the dotted name by which a file is imported, without `examples`."""
    parts = pathlib.PurePath(file).with_suffix('').parts
    return '.'.join(part for part in parts if part not in ('examples', '__init__'))


@functools.lru_cache(maxsize=None)
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
    """Return the folder of `tests/` that mirrors the folder of a file."""
    first = pathlib.PurePath(file).parts[:2]
    if first[0] == 'examples':
        return root / 'tests' / 'examples'
    return root / 'tests' / ('' if first[1].endswith('.py') else first[1])


def mirrors(root, file):
    """Return the test files that have the name of a file, or one that contains it."""
    name = module_name(file).split('.')[-1]
    return sorted(folder_of_tests(root, file).glob(f'test_*{name}*.py'))


def neighbours(root, file):
    """Return the other test files of a file's folder, and the test files of its importers."""
    name = re.compile(r'\b%s\b' % module_name(file).split('.')[-1])
    tests = sorted(
        folder_of_tests(root, file).glob('test_*.py'),
        key=lambda path: (-len(name.findall(path.read_text(encoding='utf-8'))), path),
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
    """Replace a file, and remove its compiled form."""
    path.write_text(text, encoding='utf-8')
    # Python takes the compiled form for current if size and second of the change are the same.
    pathlib.Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


# A module of the copy that notes which test, if any, comes to which mark. It holds functions that a
# test may replace.
MARKS = """
import json, os
known = set()
file = os.open(%r, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
def reached(number, write=os.write):
    test = os.environ.get('PYTEST_CURRENT_TEST', '').rpartition(' ')[0]
    if (number, test) not in known:
        known.add((number, test))
        write(file, (json.dumps([number, test]) + '\\n').encode())
"""


def statement_at(tree, place):
    """Return the innermost statement at a place: the list that it is in, and the statement."""
    for node in ast.walk(tree):  # the innermost statement comes last
        for statements in vars(node).values():
            for statement in statements if isinstance(statements, list) else ():
                if isinstance(statement, ast.stmt):
                    begin, end = position(statement)
                    if begin <= place < end:
                        found = statements, statement
    return found


def with_marks(text, places):
    """Return a program with a mark before each statement at one of the places, a dict by number."""
    tree = ast.parse(text)
    found = {number: statement_at(tree, place) for number, place in places.items()}
    for number, (block, statement) in found.items():
        # No name is bound here: that would hide another one of the function.
        mark = ast.parse(f"__import__('mutants_marks').reached({number})")
        index = next(i for i, each in enumerate(block) if each is statement)
        block[index:index] = mark.body
    return ast.unparse(ast.fix_missing_locations(tree))


def new_copy(root, folder):
    """Return a copy of a checkout in a new folder; the results of compilers are shared."""
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (ROOT / '.cache').mkdir(exist_ok=True)
    (folder / '.cache').symlink_to(ROOT / '.cache')
    return folder


def plant_marks(copy, draw):
    """Put marks into the statements of all faults; return the file to which the marks write."""
    shown = copy / 'marks.jsonl'
    (copy / 'mutants_marks.py').write_text(MARKS % str(shown))
    places = collections.defaultdict(dict)
    for number, mutant in enumerate(draw):
        places[mutant.file][number] = mutant.line, mutant.column
    for file, of_file in places.items():
        path = copy / file
        write(path, with_marks(path.read_text(encoding='utf-8'), of_file))
    return shown


def reached(root, draw, test_file):
    """Return the test file, and number of a fault -> its tests that run the fault's statement."""
    copy = root.with_name(f'marks-{os.getpid()}')
    if not copy.exists():
        plant_marks(new_copy(root, copy), draw)
    shown = copy / 'marks.jsonl'
    shown.unlink(missing_ok=True)
    run(copy, [test_file])
    tests = collections.defaultdict(list)
    for line in shown.read_text().splitlines() if shown.exists() else ():
        number, test = json.loads(line)
        # Without a name it was run by an import, or by a process that does not know its test.
        tests[number] += [test] if test.startswith(test_file + '::') else []
    return test_file, tests


def states(root, draw, files):
    """Return a hash, for each test file, of everything that decides which statements it runs."""
    shared = hashlib.sha256(repr([mutant.key for mutant in draw]).encode())
    for folder in ('chainer_bspmm', 'examples', 'tests'):
        for path in sorted((root / folder).rglob('*.py')):
            if str(path.relative_to(root)) not in files:
                shared.update(path.read_bytes())
    hashes = {}
    for file in files:
        of_file = shared.copy()
        of_file.update((root / file).read_bytes())
        hashes[file] = of_file.hexdigest()
    return hashes


def all_reached(root, draw, path, imap):
    """Return, for each fault by number, the tests that run its statement, by test file.

    path: file of these tests, which is read first, and completed.
    """
    sources = dict.fromkeys(mutant.file for mutant in draw)
    tests = [test for file in sources for test in mirrors(root, file) + neighbours(root, file)]
    files = dict.fromkeys(str(test.relative_to(root)) for test in tests)
    current = states(root, draw, files)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {row['file']: row for row in rows if current.get(row['file']) == row['state']}
    left = [file for file in current if file not in known]
    print(f'{len(current)} test files, {len(left)} of them to run with marks', flush=True)
    for file, by_number in imap(functools.partial(reached, root, draw), left):
        known[file] = dict(file=file, state=current[file], reached=list(by_number.items()))
        with path.open('a') as results:
            print(json.dumps(known[file]), file=results)
    reaching = collections.defaultdict(dict)
    for file, row in known.items():
        for number, of_file in row['reached']:
            reaching[number][file] = of_file
    return reaching


def stages(copy, mutant, tests):
    """Return the tests of a fault in lists, each of which runs if the ones before it pass.

    tests: test file -> the tests in it that run the statement.
    """

    def sample(paths):
        found = [test for path in paths for test in tests[str(path.relative_to(copy))]]
        return found[:: len(found) // SAMPLE + 1]

    own, others = (
        [path for path in paths if str(path.relative_to(copy)) in tests]
        for paths in (mirrors(copy, mutant.file), neighbours(copy, mutant.file))
    )
    rest = [path for path in map(copy.joinpath, tests) if path not in own + others]
    return [sample(own or others or rest), own, others, sample(rest) if own or others else rest]


def outcome(copy, mutant, reaching):
    """Run the tests of a fault; return its outcome, the reason, and the faulty line.

    reaching: the tests that run its statement, by test file.
    """
    path = copy / mutant.file
    text = path.read_text(encoding='utf-8')
    fault = with_fault(mutant, text)
    line = fault.splitlines()[mutant.line - 1].strip()
    for tests in filter(None, stages(copy, mutant, reaching)):
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
                if again == UNKNOWN:  # a fault in a constant may be in the name of a test's case
                    again, _ = run(copy, [reason.partition('::')[0]])
            else:  # a crash, a hang, or pytest does not even start
                reason = 'no end' if status is ENDLESS else f'exit status {status}'
                again, _ = run(copy, tests, '--collect-only')
            if again not in (PASSED, NO_TEST):
                return 'undetermined', f'without the fault as well: {reason}', line
            return 'found', reason, line
    if reaching:
        return 'survived', '', line
    return 'undetermined', 'no test runs it', line


def tried(root, case):
    """Try a fault in the copy of this process; return the row to be stored."""
    mutant, reaching = case
    copy = root.with_name(f'faults-{os.getpid()}')
    if not copy.exists():
        new_copy(root, copy)
    start = time.monotonic()
    what, reason, line = outcome(copy, mutant, reaching)
    seconds = round(time.monotonic() - start, 1)
    return {**mutant._asdict(), 'fault': line, 'outcome': what, 'by': reason, 'seconds': seconds}


def stored(path):
    """Return the lines of a file of results by their faults' keys."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Mutant(*[row[name] for name in Mutant._fields]).key: row for row in rows}


def describe(row):
    """Return a line of text about an outcome."""
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


def try_all(root, draw, results, imap):
    """Try the faults of a draw that are not yet in the file of results."""
    done = stored(results)
    left = [number for number, mutant in enumerate(draw) if mutant.key not in done]
    print(f'{len(draw)} faults, {len(draw) - len(left)} of them in {results}', flush=True)
    reaching = all_reached(root, draw, results.with_suffix('.marks.jsonl'), imap)
    cases = [(draw[number], reaching[number]) for number in left]
    for row in imap(functools.partial(tried, root), cases):
        with results.open('a') as file:
            print(json.dumps(row), file=file)
        print(describe(row), flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--number', type=int, default=100, help='number of faults')
    parser.add_argument('--jobs', type=int, default=1, help='how many are tried at once')
    parser.add_argument('--results', type=pathlib.Path, help='default: .cache/mutants-SEED.jsonl')
    args = parser.parse_args(arguments)
    results = args.results or ROOT / '.cache' / f'mutants-{args.seed}.jsonl'
    results.parent.mkdir(exist_ok=True)
    # A fault may ask for any amount of memory. Sanitizers cannot run with a limit.
    pathlib.Path('/proc/self/oom_score_adj').write_text('1000')  # the first to be ended

    with tempfile.TemporaryDirectory() as folder:
        # In a copy, tests and faults stay the same even if the checkout changes meanwhile.
        root = new_copy(ROOT, pathlib.Path(folder) / 'checkout')
        draw = drawn(root, args.seed, args.number)
        with multiprocessing.Pool(args.jobs) as pool:
            try:
                try_all(root, draw, results, pool.imap_unordered)
            except KeyboardInterrupt:
                print('interrupted: the same command continues')
    done = stored(results)
    print(summary([done[mutant.key] for mutant in draw if mutant.key in done]))


if __name__ == '__main__':
    main()
