"""docs/methods.md: its table names every method that is swapped or refused."""

import pathlib
import re

import pytest

from chainer_bspmm.models import METHODS
from chainer_bspmm.models.set_up_predictor import EDGE_LIST_METHODS, REFUSED
from chainer_bspmm.sparse.check import LAYOUTS

PAGE = (pathlib.Path(__file__).parents[2] / 'docs' / 'methods.md').read_text()
LINES = [line.split('|')[1:-1] for line in PAGE.splitlines() if line.startswith('| `')]
ROWS = {
    name: [re.sub(r' *\[\d\]', '', cell).strip() for cell in cells]
    for names, *cells in LINES
    for name in re.findall(r'`([*\w]+)`', names)
    if len(cells) == 4
}
SWAPPED = ['yes', '`concat_mols`']


@pytest.mark.parametrize('method', METHODS)
def test_swapped(method):
    base, _, variant = method.partition('_')
    *cells, layouts, captured = ROWS.get(method) or ROWS['*_' + variant]
    assert base in ROWS and cells == SWAPPED and captured == 'yes'
    assert sorted(re.split(', *', layouts)) == sorted(LAYOUTS)


@pytest.mark.parametrize('method', EDGE_LIST_METHODS)
def test_lists_of_edges(method):
    assert ROWS[method] == ['yes', "`CSRConverter('packed')`", 'packed', 'yes']


@pytest.mark.parametrize('method', REFUSED)
def test_refused(method):
    swapped, converter, *others = ROWS[method]
    assert swapped.startswith('no: ') and [converter, *others] == ["upstream's", '', '']


def test_no_other_methods():
    labelled = {'*' + method[method.index('_') :] for method in METHODS if 'wle' in method}
    assert set(ROWS) <= {*METHODS, *EDGE_LIST_METHODS, *REFUSED, *labelled, 'mpnn'}
