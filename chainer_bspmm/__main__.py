"""The commands ``python -m chainer_bspmm info`` and ``python -m chainer_bspmm run SCRIPT.py``."""

import argparse
import sys

import chainer_bspmm
from chainer_bspmm import info, run_script


def main():
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog='python -m chainer_bspmm',
        allow_abbrev=False,
        description='Batched sparse products for the graph convolutions of Chainer Chemistry.',
    )
    parser.add_argument('--version', action='version', version=chainer_bspmm.__version__)
    commands = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    commands.add_parser(
        'info',
        help='versions, devices and a self-test, for a bug report',
        description='Print versions and devices, and compare seven sparse models with their dense '
        'originals on every device. The exit status is 1 if a result is wrong.',
    )
    run = commands.add_parser(
        'run',
        help='run a script on a repaired Chainer',
        allow_abbrev=False,
        description='Let Chainer and Chainer Chemistry run on this Python and NumPy, then run a '
        'script as `python SCRIPT ARGS...` does.',
    )
    run.add_argument('script', metavar='SCRIPT')
    run.add_argument('args', metavar='ARGS', nargs='*', default=[])
    words = sys.argv[1:]
    # argparse would remove a leading `--` from the script's arguments.
    rest = words[2:] if words[:1] == ['run'] else []
    args = parser.parse_args(words[:2] if rest and not words[1].startswith('-') else words)
    if args.command == 'info':
        return info.info()
    try:
        open(args.script, 'rb').close()
    except OSError as error:
        run.error('SCRIPT: expected a Python file, got %r: %s' % (args.script, error.strerror))
    if args.script.lower().endswith('.ipynb'):
        run.error(
            'SCRIPT: expected a Python file, got the notebook %r: import chainer_bspmm in its '
            'first cell, or make a script of it with `jupyter nbconvert --to script`' % args.script
        )
    run_script.run_script(args.script, rest)
    return 0


if __name__ == '__main__':
    sys.exit(main())
