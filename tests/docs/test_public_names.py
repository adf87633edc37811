"""Public names are annotated, and on a page of the API, and their examples run as printed."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import chainer_bspmm

ROOT = pathlib.Path(__file__).parents[2]
SUBPACKAGES = [
    importlib.import_module(info.name)
    for info in pkgutil.iter_modules(chainer_bspmm.__path__, 'chainer_bspmm.')
    if info.ispkg
]
PACKAGES = [chainer_bspmm, *(package for package in SUBPACKAGES if hasattr(package, '__all__'))]
NAMES = {
    f'{package.__name__}.{name}': getattr(package, name)
    for package in PACKAGES[1:]
    for name in package.__all__
}


def api_page(package):
    return ROOT / 'docs' / 'api' / (package.__name__.rpartition('.')[2] + '.md')


def signature(member):
    """Return the signature of a function, or of a constructor, of this package; else None."""
    if inspect.isclass(member):
        member = vars(member).get('__init__')
    if not inspect.isfunction(member) or not member.__module__.startswith('chainer_bspmm'):
        return None  # Chainer Chemistry's constructor
    return inspect.signature(member)


FUNCTIONS = [name for name, member in NAMES.items() if signature(member) is not None]
EXAMPLES = sorted(
    {member.__module__ for member in NAMES.values() if '>>>' in (member.__doc__ or '')}
)


def test_packages_are_found():
    names = {package.__name__ for package in PACKAGES}
    assert {'chainer_bspmm.functions', 'chainer_bspmm.training'} <= names


def test_functions_are_found():
    assert 'chainer_bspmm.functions.bspmm' in FUNCTIONS


def test_examples_are_found():
    assert 'chainer_bspmm.ops.bspmm' in EXAMPLES


@pytest.mark.parametrize('name', FUNCTIONS)
def test_is_annotated(name):
    member = NAMES[name]
    found = signature(member)
    missing = [
        parameter.name
        for parameter in found.parameters.values()
        if parameter.name != 'self'
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)  # are passed on
        and parameter.annotation is parameter.empty
    ]
    if not inspect.isclass(member) and found.return_annotation is found.empty:
        missing.append('return')
    assert not missing


@pytest.mark.parametrize('name', NAMES)
def test_has_docstring(name):
    member = NAMES[name]
    if callable(member):
        assert member.__doc__ and member.__doc__.strip()


@pytest.mark.parametrize('package', PACKAGES, ids=lambda package: package.__name__)
def test_has_api_page(package):
    text = api_page(package).read_text()
    assert f'api/{api_page(package).name}' in (ROOT / 'mkdocs.yml').read_text()
    if package is chainer_bspmm:
        named = [
            f'`{name}`' for name in package.__all__ if not inspect.ismodule(getattr(package, name))
        ]
        assert [name for name in named if name not in text] == []
    else:
        assert f'\n::: {package.__name__}\n' in text  # tools/docs_hooks.py expands this


@pytest.mark.parametrize('module', EXAMPLES)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed


@pytest.mark.slow
def test_site_has_every_public_name(tmp_path):
    pytest.importorskip('mkdocstrings')
    done = subprocess.run(
        [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for package in PACKAGES[1:]:
        page = tmp_path / 'api' / (api_page(package).stem + '.html')
        headings = re.findall(r'<h2 id="[^"]*\.(\w+)" class="doc', page.read_text())
        assert sorted(headings) == sorted(package.__all__)
