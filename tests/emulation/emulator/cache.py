"""Results of compilers, which are kept between runs and shared by concurrent processes."""

import hashlib
import os
import pathlib
import subprocess
import time

import functools

FOLDER = pathlib.Path(__file__).resolve().parents[3] / '.cache' / 'emulation'
DAYS = 14  # unused files are removed after so many days


@functools.lru_cache(maxsize=None)
def version(compiler):
    """Return the text of a compiler's version."""
    return subprocess.run([compiler, '--version'], capture_output=True, text=True).stdout


@functools.lru_cache(maxsize=None)
def _folder():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.iterdir():
        if path.stat().st_mtime < time.time() - DAYS * 24 * 3600:
            path.unlink(missing_ok=True)
    return FOLDER


def cached(make, suffix, *parts):
    """Return the path of the file that ``make(path)`` has written in this or an earlier run.

    suffix: end of the file's name.
    parts: everything on which the contents of the file depend.
    """
    text = repr(parts)
    path = _folder() / (hashlib.sha256(text.encode()).hexdigest()[:32] + suffix)
    try:
        os.utime(path)
    except FileNotFoundError:
        # Another process may write the file, too. The last one replaces it by an equal one.
        unfinished = path.with_name('%d-%s' % (os.getpid(), path.name))
        make(unfinished)
        os.replace(unfinished, path)
    return path


def cached_text(make, *parts):
    """Return the text that ``make()`` has returned in this or an earlier run."""
    return cached(lambda path: path.write_text(make()), '.txt', *parts).read_text()


class CompileError(Exception):
    """Error of g++ for a source; the message is the output of g++."""


def compile_cpp(path, text, *options, after=()):
    """Compile a text to a file, linked with the files `after`, or raise `CompileError`."""
    words = ['g++', '-std=c++17', *options, '-x', 'c++', '-', *after, '-o', path]
    done = subprocess.run([*map(str, words)], input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr)


def library(text, *options):
    """Return the path of the shared library of a C++ text, compiled by g++ with these options."""
    return cached(
        lambda path: compile_cpp(path, text, *options), '.so', version('g++'), text, options
    )
