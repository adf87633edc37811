"""Command ``python -m chainer_bspmm run``: scripts run as under plain Python."""

import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import time

import pytest

from chainer_bspmm import run_script
from chainer_bspmm.compat import script_repairs
from tests.support.processes import environment, python, ROOT

# The interpreter does this for -m.
OURS = 'import runpy; runpy._run_module_as_main("chainer_bspmm")'


@pytest.fixture
def command(forks, tmp_path):
    """Function that runs `python -m chainer_bspmm WORDS` in `tmp_path`."""
    return lambda *words: forks.run(OURS, ['-m', *words], tmp_path)


def run(*words, cwd):
    return python(*words, cwd=cwd, status=None)


@pytest.fixture
def both(command, tmp_path):
    """Function that runs a script with Python and with the command, which must give equal results.

    Returns both results.
    """

    def run_both(text, *arguments):
        (tmp_path / 'script.py').write_text(text)
        plain = run('script.py', *arguments, cwd=tmp_path)
        ours = command('run', 'script.py', *arguments)
        assert ours.returncode == plain.returncode, ours.stderr
        assert ours.stdout == plain.stdout
        return plain, ours

    return run_both


SEEN = """
import sys, os
print(sys.argv, sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
print(__name__, __file__, __package__, __spec__, __doc__, sorted(globals()))
print(sys.modules['__main__'].__dict__ is globals(), type(__builtins__))
"""


def test_a_script_sees_what_it_sees_under_python(both, tmp_path):
    (tmp_path / 'neighbour.py').write_text('value = 7\n')
    text = '"""Its docstring."""' + SEEN + 'import neighbour\nprint(neighbour.value)\n'
    plain, ours = both(text, 'a', '--epoch', '3', '--', '-x', '--help')
    assert "['script.py', 'a', '--epoch', '3', '--', '-x', '--help'] True" in ours.stdout
    assert ours.stdout.endswith('\n7\n') and ours.stderr == plain.stderr == ''


@pytest.mark.parametrize('arguments', [['--', '--help'], ['--help']])
def test_arguments_may_begin_with_those_of_the_command(both, arguments):
    _, ours = both('import sys; print(sys.argv[1:])', *arguments)
    assert ours.stdout == '%s\n' % arguments


@pytest.mark.parametrize(
    'text',
    [
        'import sys; sys.exit(3)',
        'import sys; sys.exit("words")',
        pytest.param('raise SystemExit', marks=pytest.mark.slow),
        pytest.param('exit()', marks=pytest.mark.slow),
        'import atexit; x = 5; atexit.register(lambda: print(x))',
        'import os; os._exit(4)',
    ],
)
def test_exit(both, text):
    plain, ours = both(text)
    assert ours.stderr == plain.stderr


@pytest.mark.parametrize(
    'text',
    [
        '\n\ndef f():\n    raise ValueError("words")\n\nf()\n',
        'try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError("a") from e\n',
        'x = 1\ny = (\n',
        pytest.param('import nothing_of_that_name\n', marks=pytest.mark.slow),
        pytest.param('exec("1 +")\n', marks=pytest.mark.slow),
        'raise KeyboardInterrupt\n',
    ],
)
def test_tracebacks_are_the_scripts(both, text):
    plain, ours = both(text)
    assert plain.stderr and ours.stderr == plain.stderr


def test_interrupt(tmp_path):
    (tmp_path / 'script.py').write_text('import time\nprint("ready", flush=True)\ntime.sleep(60)\n')
    with subprocess.Popen(
        [sys.executable, '-m', 'chainer_bspmm', 'run', 'script.py'],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout.readline() == 'ready\n'
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert error.count('File "') == 1 and error.endswith('KeyboardInterrupt\n')


def test_classes_of_the_script_pickle_into_plain_python(command, tmp_path):
    text = (
        'import pickle, sys\nclass Thing:\n    x = 3\n'
        'if sys.argv[1] == "save":\n    pickle.dump(Thing(), open("thing.pkl", "wb"))\n'
        'else:\n    print(pickle.load(open("thing.pkl", "rb")).x)\n'
    )
    (tmp_path / 'script.py').write_text(text)
    assert command('run', 'script.py', 'save').returncode == 0
    assert run('script.py', 'load', cwd=tmp_path).stdout == '3\n'
    assert command('run', 'script.py', 'load').stdout == '3\n'


# Without repairs, Chainer cannot be imported with NumPy 2 or with Python 3.12.
CHILDREN = """
import multiprocessing
import sys
import chainer
from chainer_chemistry.models import RSGCN

class Thing:
    def __init__(self, x):
        self.x = x

def work(thing):
    return Thing(RSGCN(out_dim=2, n_layers=2)(*[chainer.Variable(chainer.utils.force_array(a)).array
                                    for a in thing.x]).shape), 'chainer_bspmm' in sys.modules

if __name__ == '__main__':
    import numpy
    x = numpy.array([[6, 8]], 'i'), numpy.ones((1, 2, 2), 'f')
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        thing, repaired = pool.map(work, [Thing(x)])[0]
    print(thing.x, repaired)
"""


@pytest.mark.slow
@pytest.mark.parametrize('method', ['fork', 'spawn', 'forkserver'])
def test_child_processes_are_repaired(tmp_path, method):
    (tmp_path / 'script.py').write_text(CHILDREN)
    done = run('-m', 'chainer_bspmm', 'run', 'script.py', method, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, '(1, 2) True\n'), done.stderr


@pytest.mark.parametrize('has_code', [True, False])
def test_a_spawned_process_imports_the_package_first(monkeypatch, tmp_path, has_code):
    code = 'print("chainer_bspmm" in sys.modules, __name__)'
    plain = [sys.executable, '-c', 'import sys; ' + code] if has_code else ['frozen', '--fork']
    monkeypatch.setattr(multiprocessing, 'set_forkserver_preload', lambda names: None)
    monkeypatch.setattr(multiprocessing.spawn, 'get_command_line', lambda **options: plain)
    run_script.repair_child_processes()
    command = multiprocessing.spawn.get_command_line(pipe_handle=3)
    if not has_code:  # of an executable that is no interpreter
        assert command == plain
        return
    assert run(*command[1:], cwd=tmp_path).stdout == 'True __main__\n'


# Without repairs, importing Chainer fails.
CHILD = """
import subprocess, sys
text = 'import {} as module, chainer, sys; print(module.__spec__.name, chainer.Variable.__name__)'
for name in sys.argv[1:]:
    subprocess.run([sys.executable, '-c', text.format(name)], check=True)
"""


@pytest.mark.slow
def test_interpreters_that_a_script_starts_are_repaired(command, tmp_path):
    (tmp_path / 'script.py').write_text(CHILD)
    names = ['chainer', 'chainer.functions', 'chainer_chemistry.models', 'chainermn']
    done = command('run', 'script.py', *names)
    assert done.stdout.splitlines() == ['%s Variable' % name for name in names], done.stderr


def test_interpreters_of_another_folder_are_repaired(tmp_path):
    """The package may be found only because the current folder contains it."""
    (tmp_path / 'script.py').write_text(CHILD + 'import os; print(os.environ["PYTHONPATH"])\n')
    done = subprocess.run(
        [sys.executable, '-m', 'chainer_bspmm', 'run', str(tmp_path / 'script.py'), 'chainer'],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name != 'PYTHONPATH'},
        capture_output=True,
        text=True,
        timeout=300,
    )
    folder = ROOT / 'chainer_bspmm' / 'in_children'
    assert done.stdout == 'chainer Variable\n%s\n' % folder, done.stderr


JOBLIB = """
import numpy, chainer
from joblib import Parallel, delayed

def f(x):
    return float(chainer.Variable(numpy.ones(1, 'f')).array.sum()) + x

print(Parallel(n_jobs=2)(delayed(f)(i) for i in range(3)))
"""


@pytest.mark.slow
def test_processes_of_joblib_are_repaired(command, tmp_path):
    """scikit-learn starts such processes for n_jobs."""
    (tmp_path / 'script.py').write_text(JOBLIB)
    done = command('run', 'script.py')
    assert done.stdout == '[1.0, 2.0, 3.0]\n', done.stderr


def test_interpreters_without_chainer_see_what_they_see_under_python(both):
    _, ours = both("""
import subprocess, sys
text = 'import sys; print(sys.path, "numpy" in sys.modules, "chainer_bspmm" in sys.modules)'
subprocess.run([sys.executable, '-c', text])
""")
    assert ours.stdout.endswith('] False False\n') and ours.stderr == ''


STARTS_WITH = """
import os, pathlib, subprocess, sys
pathlib.Path('other').mkdir(exist_ok=True)
pathlib.Path('other', 'sitecustomize.py').write_text(sys.argv[1])
path = os.environ.get('PYTHONPATH', '')
os.environ['PYTHONPATH'] = os.pathsep.join([path, os.path.abspath('other')])
done = subprocess.run([sys.executable, '-c', 'import sitecustomize as s; print(s.__file__)'])
"""


def test_another_sitecustomize_is_run(both):
    _, ours = both(STARTS_WITH, 'print(__name__, __file__)')
    first, second = ours.stdout.splitlines()
    assert first == 'sitecustomize ' + second


@pytest.mark.parametrize('text', ['import no_such_module', 'raise ValueError("words")'])
def test_another_sitecustomize_fails_as_under_python(both, text):
    plain, ours = both(STARTS_WITH, text)
    assert plain.stderr.startswith('Error in sitecustomize; set PYTHONVERBOSE for traceback:\n')
    assert ours.stderr == plain.stderr


def test_interpreters_of_another_environment_are_left_alone(command, tmp_path):
    (tmp_path / 'script.py').write_text("""
import os, subprocess, sys
text = 'import sys; print([getattr(finder, "__name__", None) for finder in sys.meta_path])'
for prefix in (sys.prefix, '/elsewhere'):
    environment = dict(os.environ, CHAINER_BSPMM_RUN=prefix)
    subprocess.run([sys.executable, '-c', text], env=environment)
""")
    same, other = command('run', 'script.py').stdout.splitlines()
    assert 'RepairedChainer' in same and 'RepairedChainer' not in other


@pytest.mark.parametrize('before, after', [(None, []), ('', []), ('a:b', ['a', 'b'])])
def test_a_folder_is_put_on_the_path_of_interpreters_once(monkeypatch, before, after):
    monkeypatch.delenv('PYTHONPATH', raising=False)
    monkeypatch.setenv('CHAINER_BSPMM_RUN', '')
    if before is not None:
        monkeypatch.setenv('PYTHONPATH', before.replace(':', os.pathsep))
    for _ in range(2):
        run_script.repair_interpreters()
    folder = str(ROOT / 'chainer_bspmm' / 'in_children')
    assert os.environ['PYTHONPATH'] == os.pathsep.join([folder, *after])
    assert os.environ['CHAINER_BSPMM_RUN'] == sys.prefix


def test_upstreams_plot_scripts_annotate(command, tmp_path):
    (tmp_path / 'script.py').write_text(
        'import matplotlib\nmatplotlib.use("agg")\nimport matplotlib.pyplot as plt\n'
        'text = plt.figure().gca().annotate(s="1.5", xy=(0, 0), ha="left")\n'
        'print(text.get_text(), plt.annotate("2", (0, 0)).get_text())\n'
    )
    assert command('run', 'script.py').stdout == '1.5 2\n'


def test_upstreams_network_script_reads_a_bool(tmp_path, monkeypatch):
    monkeypatch.setenv('SETUPTOOLS_USE_DISTUTILS', 'stdlib')  # Python 3.12 has no distutils
    (tmp_path / 'script.py').write_text(
        'from distutils.util import strtobool\n'
        'print([int(strtobool(text)) for text in ("yes", "True", "off", "0")])\n'
        'strtobool("maybe")\n'
    )
    done = run('-m', 'chainer_bspmm', 'run', 'script.py', cwd=tmp_path)
    assert done.stdout == '[1, 1, 0, 0]\n'
    assert done.stderr.endswith("\nValueError: invalid truth value 'maybe'\n")


@pytest.mark.parametrize('text, value', [('yes', 1), ('True', 1), ('off', 0), ('0', 0)])
def test_words_for_a_bool(text, value):
    assert script_repairs.strtobool(text) == value


def test_another_word_is_no_bool():
    with pytest.raises(ValueError, match="^invalid truth value 'maybe'$"):
        script_repairs.strtobool('maybe')


def test_a_link_to_a_script_is_on_the_path_of_what_it_links_to(command, tmp_path):
    (tmp_path / 'real').mkdir()
    (tmp_path / 'real' / 'neighbour.py').write_text('value = 7\n')
    (tmp_path / 'real' / 'script.py').write_text('import neighbour\nprint(neighbour.value)\n')
    (tmp_path / 'link.py').symlink_to(tmp_path / 'real' / 'script.py')
    assert run('link.py', cwd=tmp_path).stdout == '7\n'
    assert command('run', 'link.py').stdout == '7\n'


def test_other_encodings(command, tmp_path):
    (tmp_path / 'script.py').write_bytes('# coding: latin-1\nprint(ascii("é"))\n'.encode('latin-1'))
    assert command('run', 'script.py').stdout == "'\\xe9'\n"


@pytest.mark.parametrize(
    'arguments, message',
    [
        (
            ['run', 'missing.py', '--epoch', '3'],
            "SCRIPT: expected a Python file, got 'missing.py': No such file or directory",
        ),
        (['run', '.'], "SCRIPT: expected a Python file, got '.': Is a directory"),
        (
            ['run', 'tour.ipynb'],
            "SCRIPT: expected a Python file, got the notebook 'tour.ipynb': import chainer_bspmm "
            'in its first cell, or make a script of it with `jupyter nbconvert --to script`',
        ),
        (['run'], 'the following arguments are required: SCRIPT'),
        ([], 'the following arguments are required: COMMAND'),
    ],
)
def test_errors_are_a_line_below_the_usage(command, tmp_path, arguments, message):
    (tmp_path / 'tour.ipynb').write_text('{}')
    done = command(*arguments)
    assert done.returncode == 2
    usage, line = done.stderr.splitlines()
    assert usage.startswith('usage: python -m chainer_bspmm ')
    assert line == ' '.join(['python -m chainer_bspmm', *arguments[:1]]) + ': error: ' + message


def test_another_command_is_refused(command):
    done = command('walk')
    assert done.returncode == 2
    # The list of other commands depends on the version of Python.
    start = "python -m chainer_bspmm: error: argument COMMAND: invalid choice: 'walk' (choose from "
    assert done.stderr.splitlines()[-1].startswith(start)


@pytest.mark.parametrize('arguments', [['--help'], ['run', '--help'], ['info', '--help']])
def test_help(command, arguments):
    done = command(*arguments)
    assert done.returncode == 0 and done.stdout.startswith('usage: python -m chainer_bspmm')
