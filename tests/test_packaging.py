"""The version has one source, and sdist and wheel depend only on the sources."""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile

import pytest

import chainer_bspmm
from tests.examples.scripts import imported

ROOT = pathlib.Path(__file__).resolve().parents[1]
VERSION = chainer_bspmm.__version__


@pytest.mark.parametrize(
    'file, line',
    [
        ('setup.cfg', '\nversion = attr: chainer_bspmm.__version__\n'),
        ('CITATION.cff', f'\nversion: {VERSION}\n'),
        ('CHANGELOG.md', f'\n## [{VERSION}]'),
    ],
)
def test_the_version_is_that_of_the_package(file, line):
    assert line in (ROOT / file).read_text()


def test_an_sdist_depends_on_its_files_only(tmp_path):
    package = imported(ROOT / 'tools', 'package')
    digests = set()
    for names, seconds, mode in (('ab', 10, 0o644), ('ba', 20, 0o664)):
        path = tmp_path / f'{names}.tar.gz'
        with tarfile.open(path, 'w:gz') as archive:
            for name in names:
                file = tmp_path / name
                file.write_text(name)
                file.chmod(mode)
                os.utime(file, (seconds, seconds))
                archive.add(file, name)
        package.rewrite(path, 5)
        digests.add(hashlib.sha256(path.read_bytes()).digest())
        with tarfile.open(path) as archive:
            members = [(m.name, m.mtime, m.mode, m.uid) for m in archive.getmembers()]
            assert members == [('a', 5, 0o644, 0), ('b', 5, 0o644, 0)]
            assert archive.extractfile('b').read() == b'b'
    assert len(digests) == 1


def build(checkout, out):
    """Build the sdist and the wheel of a checkout; return name -> digest of their files."""
    subprocess.run(
        [sys.executable, 'tools/package.py', out],
        cwd=checkout,
        check=True,
        capture_output=True,
        env={**os.environ, 'SOURCE_DATE_EPOCH': '1735689600', 'PYTHONPATH': ''},
    )
    return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in out.iterdir()}


IGNORED = shutil.ignore_patterns(
    '.git', '.venv*', '.*cache', '.hypothesis', 'site', 'dist', 'build', '*.egg-info'
)


@pytest.mark.slow
def test_two_builds_are_equal(tmp_path):
    pytest.importorskip('build')
    found = []
    for name in 'ab':
        shutil.copytree(ROOT, tmp_path / name, ignore=IGNORED)
        found.append(build(tmp_path / name, tmp_path / f'dist-{name}'))
        time.sleep(1)
    assert found[0] == found[1]
    sdist, wheel = f'chainer_bspmm-{VERSION}.tar.gz', f'chainer_bspmm-{VERSION}-py3-none-any.whl'
    assert set(found[0]) == {sdist, wheel}
    with zipfile.ZipFile(tmp_path / 'dist-a' / wheel) as archive:
        metadata = archive.read(f'chainer_bspmm-{VERSION}.dist-info/METADATA').decode()
    assert re.search(f'^Version: {VERSION}$', metadata, re.MULTILINE)


@pytest.mark.slow
def test_a_module_that_an_earlier_build_has_left_is_not_installed(tmp_path):
    """`pip install .` builds in the checkout, and leaves its folder build/ there."""
    pytest.importorskip('build')
    checkout = tmp_path / 'checkout'
    shutil.copytree(ROOT, checkout, ignore=IGNORED)
    stale = checkout / 'build' / 'lib' / 'chainer_bspmm' / 'stale.py'
    stale.parent.mkdir(parents=True)
    stale.write_text('')
    subprocess.run(
        [
            sys.executable,
            '-m',
            'build',
            '--wheel',
            '--no-isolation',
            '--outdir',
            tmp_path,
            checkout,
        ],
        check=True,
        capture_output=True,
        env={**os.environ, 'PYTHONPATH': ''},
    )
    with zipfile.ZipFile(tmp_path / f'chainer_bspmm-{VERSION}-py3-none-any.whl') as archive:
        names = archive.namelist()
    assert 'chainer_bspmm/__init__.py' in names and 'chainer_bspmm/stale.py' not in names
