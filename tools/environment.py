"""Make a virtual environment with this checkout and its requirements, which setup.cfg lists.

    python tools/environment.py DIRECTORY [--lowest]

DIRECTORY is recreated. A file in it is named `unfinished` until everything is installed, then
`ready`: an interrupted run is not taken for a whole one. A folder with neither is not ours and
is kept. With --lowest every requirement of setup.cfg is installed in the oldest version it allows.

Two upstream packages need care. Chainer's sdist imports pkg_resources in its setup.py, which
setuptools no longer has: it is built with an older one, without isolation, and the newest comes
last, as users have it. Chainer Chemistry asks for PyPI's `typing`, an obsolete copy of the standard
module: it is installed without its dependencies, and setup.cfg names the others.
"""

import configparser
import os
import re
import shutil
import subprocess
import sys
import time

EXTRAS = 'examples', 'test', 'mpi', 'docs', 'dev'
CHECKOUT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def check_interpreter():
    """Exit with advice if this interpreter cannot make the environment."""
    version = '%d.%d' % sys.version_info[:2]
    if sys.version_info < (3, 10):
        sys.exit(
            'Python 3.10 or newer is needed, and %s is Python %s. '
            'Name another: make PYTHON=python3.13' % (sys.executable, version)
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        sys.exit(
            f'Python {version} ({sys.executable}) has no module {error.name}, which makes '
            'virtual environments.\nOn Debian and Ubuntu this brings it:\n'
            f'    sudo apt-get update && sudo apt-get install -y python{version}-venv'
        )


def requirements(lowest):
    """Read the requirements of setup.cfg; if lowest is true, as `name==version` of the oldest."""
    config = configparser.ConfigParser()
    config.read(os.path.join(CHECKOUT, 'setup.cfg'), encoding='utf-8')
    lines = config['options']['install_requires'].split('\n')
    for extra in EXTRAS:
        lines += config['options.extras_require'][extra].split('\n')
    lines = sorted({line.strip() for line in lines if line.strip()})
    return [re.sub('>=([^,]+).*', r'==\1', line) for line in lines] if lowest else lines


def stage(name, *command):
    """Run a command, with one line for the user."""
    print(f'  {name} ...', end='', flush=True)
    start = time.monotonic()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    print(f' {time.monotonic() - start:.0f} s', flush=True)


def make(directory, lowest):
    """Make the environment in directory."""
    print('%s: Python %d.%d.%d' % (directory, *sys.version_info[:3]))
    python = os.path.join(directory, 'bin', 'python')
    # -I: nothing on PYTHONPATH or in the user site counts as installed. -qq: errors only.
    install = (
        python,
        '-I',
        '-m',
        'pip',
        'install',
        '-qq',
        '--disable-pip-version-check',
        '--no-build-isolation',
    )
    unfinished, ready = (os.path.join(directory, name) for name in ('unfinished', 'ready'))
    if os.path.exists(directory):
        if not os.path.exists(unfinished) and not os.path.exists(ready):
            sys.exit(
                f'{directory} exists and was not made by this tool. Remove or rename it, then run '
                'again'
            )
        shutil.rmtree(directory)
    os.mkdir(directory)
    open(unfinished, 'w').close()
    needed = requirements(lowest)
    chemistry = [line for line in needed if line.startswith('chainer-chemistry')]
    stage('environment', sys.executable, '-m', 'venv', directory)
    stage('build tools', *install, 'setuptools>=64,<81', 'wheel')
    stage('dependencies', *install, *[line for line in needed if line not in chemistry])
    stage(
        'Chainer Chemistry and chainer_bspmm',
        *install,
        '--no-deps',
        *chemistry,
        '--editable',
        CHECKOUT,
    )
    if not lowest:
        stage('newest setuptools', *install, '--upgrade', 'setuptools')
    os.rename(unfinished, ready)


def main():
    directory, *options = sys.argv[1:]
    check_interpreter()
    try:
        make(directory, lowest=options == ['--lowest'])
    except subprocess.CalledProcessError as error:
        sys.exit(
            f'\n{" ".join(error.cmd)}\nfailed with exit status {error.returncode}; '
            f'{directory} is not ready'
        )
    except KeyboardInterrupt:
        sys.exit(f'\ninterrupted; {directory} is not ready')


if __name__ == '__main__':
    main()
