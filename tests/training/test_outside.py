"""`reaches_outside` recognises code that opens files or starts processes."""

import os
import os.path
import subprocess
from os import remove
from subprocess import run

import numpy
import pytest

from chainer_bspmm.training.outside import reaches_outside


def opens(path):
    return open(path)


def of_a_path(path):
    path.write_text('x')


def of_numpy(path):
    numpy.save(path, 1)


def of_os(path):
    os.replace(path, path)


def of_os_in_a_loop(paths):
    return [os.remove(path) for path in paths]


def imports_os(path):
    import os

    os.rename(path, path)


def imports_two_names_from_os(name):
    from os import path, remove

    remove(path.join('a', name))


def of_a_name_from_os(path):
    remove(path)


def of_subprocess(command):
    subprocess.run(command)


def of_a_name_from_subprocess(command):
    run(command)


def imports_a_module(command):
    import socket

    return socket


NAMES = {
    opens: 'open',
    of_a_path: 'write_text',
    of_numpy: 'save',
    of_os: 'replace',
    of_os_in_a_loop: 'remove',
    imports_os: 'rename',
    imports_two_names_from_os: 'remove',
    of_a_name_from_os: 'remove',
    of_subprocess: 'subprocess',
    of_a_name_from_subprocess: 'run',
    imports_a_module: 'socket',
}


def of_texts_and_lists(items):
    items.remove('a')
    print(os.path.join('a', 'b').replace('b', 'c'), os.environ)


@pytest.mark.parametrize('function', NAMES, ids=lambda function: function.__name__)
def test_code_that_reaches_outside(function):
    expected = 'repeat what %s does outside of Python (%s)' % (function.__name__, NAMES[function])
    assert reaches_outside([of_texts_and_lists, function]) == expected


def test_code_that_does_not():
    assert reaches_outside([of_texts_and_lists]) == ''
