"""docs/methods.md: its table names every method that is swapped and every one that is refused."""

import pathlib
import re

import pytest

from chainer_bspmm.models import METHODS
from chainer_bspmm.models.set_up_predictor import REFUSED

PAGE = (pathlib.Path(__file__).parents[2] / 'docs' / 'methods.md').read_text()
ROWS = [line.split('|')[1:-1] for line in PAGE.splitlines() if line.startswith('| `')]
CONVERTERS = {
    name: converter.strip(' `')
    for names, converter, *_ in ROWS
    for name in re.findall(r'`([*\w]+)`', names)
}


@pytest.mark.parametrize('method', METHODS)
def test_swapped(method):
    base, _, variant = method.partition('_')
    converter = CONVERTERS.get(method) or CONVERTERS['*_' + variant]
    assert base in CONVERTERS and not converter.startswith('refused')
    assert ('n_node_columns=1' in converter) == (variant in ('cwle', 'gwle'))


@pytest.mark.parametrize('method', REFUSED)
def test_refused(method):
    assert CONVERTERS[method].startswith('refused')
