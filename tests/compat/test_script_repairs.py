"""Repairs for scripts of other versions, such as arguments of Chainer Chemistry before 0.6."""

import importlib
import inspect
import re
import warnings

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import optimizers
from chainer.iterators import SerialIterator
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.models import GGNN, NFP

from chainer_bspmm.compat import script_repairs
from chainer_bspmm.compat.script_repairs import RENAMED, taking_old_keywords
from tests.support.processes import python, ROOT

CLASSES = [
    (getattr(importlib.import_module(module), name), renamed)
    for module, classes in RENAMED.items()
    for name, renamed in classes.items()
]
# Values that differ from the defaults of both versions.
VALUES = {
    'ch_list': [4, 6, 8],
    'hidden_dim': 12,
    'n_layers': 3,
    'num_edge_type': 5,
    'out_channels': 7,
    'out_size': 7,
}
OTHERS = {'out_dim': 9, 'in_channels': 12, 'out_channels': 12}


def required(kind):
    """Return a dict of the arguments that a class needs today, including renamed ones."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    names = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return {name: OTHERS[name] for name in names}


def described(link):
    """Return the shapes of a link's parameters, and its plain attributes."""
    shapes = {
        path: None if param.array is None else param.shape for path, param in link.namedparams()
    }
    plain = {
        name: value
        for name, value in vars(link).items()
        if isinstance(value, (int, float, str)) and not name.startswith('_')
    }
    return shapes, plain


@pytest.fixture
def unwarned(monkeypatch):
    """Function that returns a class whose old keywords give a warning, as in a new process."""

    def fresh(kind, renamed):
        init = taking_old_keywords(kind.__name__, kind.__init__.__wrapped__, renamed)
        monkeypatch.setattr(kind, '__init__', init)
        return kind

    return fresh


@pytest.mark.parametrize('kind, renamed', CLASSES, ids=lambda value: getattr(value, '__name__', ''))
def test_old_keywords_mean_the_new_ones(kind, renamed, unwarned):
    """One warning names all old keywords, and today's keywords give none."""
    old = {name: VALUES[name] for name in renamed}
    new = {renamed[name]: value for name, value in old.items() if renamed[name] is not None}
    others = {name: value for name, value in required(kind).items() if name not in new}
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        expected = unwarned(kind, renamed)(**new, **others)
    words = ', '.join(
        '%s is %s' % (name, renamed[name] or 'gone, and had no effect') for name in old
    )
    message = '%s: since Chainer Chemistry 0.6 %s (docs/migration.md)' % (kind.__name__, words)
    with pytest.warns(UserWarning, match='^%s$' % re.escape(message)) as caught:
        actual = [kind(**old, **others) for _ in range(3)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for link in actual:
        assert described(link) == described(expected)


@pytest.mark.parametrize('kind, renamed', CLASSES, ids=lambda value: getattr(value, '__name__', ''))
def test_todays_classes_do_not_have_these_keywords(kind, renamed):
    """Otherwise a keyword of today would change its meaning."""
    parameters = set(inspect.signature(kind.__init__).parameters)
    assert not parameters & set(renamed)
    assert parameters >= {new for new in renamed.values() if new is not None}


def test_a_keyword_that_a_class_has_keeps_its_meaning():
    def init(self, hidden_dim, hidden_channels=3):
        self.found = hidden_dim, hidden_channels

    kind = type('Own', (), {'__init__': taking_old_keywords('Own', init, RENAMED_OF_NFP)})
    assert kind(hidden_dim=5).found == (5, 3)


RENAMED_OF_NFP = RENAMED['chainer_chemistry.models.nfp']['NFP']


def test_old_and_new_keyword_together():
    message = (
        "NFP.__init__() got multiple values for argument 'hidden_channels': "
        "also as 'hidden_dim', its old name"
    )
    with pytest.raises(TypeError, match='^%s$' % re.escape(message)):
        NFP(16, hidden_channels=8, hidden_dim=8)


@pytest.mark.filterwarnings('ignore:NFP')
def test_an_old_keyword_and_an_argument_in_its_place():
    """The error is Python's own for an argument that is passed twice."""
    message = "NFP.__init__() got multiple values for argument 'hidden_channels'"
    with pytest.raises(TypeError, match='^%s$' % re.escape(message)):
        NFP(16, 8, hidden_dim=8)


def test_a_keyword_that_never_was():
    message = "NFP.__init__() got an unexpected keyword argument 'hidden_dims'"
    with pytest.raises(TypeError, match='^%s$' % re.escape(message)):
        NFP(16, hidden_dims=8)


def test_classes_of_a_user_and_swapped_ones_take_them(unwarned):
    class Own(GGNN):
        def __init__(self, out_dim, hidden_dim):
            super().__init__(out_dim, hidden_dim=hidden_dim, n_layers=2)

    unwarned(GGNN, RENAMED['chainer_chemistry.models.ggnn']['GGNN'])
    message = (
        'GGNN: since Chainer Chemistry 0.6 hidden_dim is hidden_channels, '
        'n_layers is n_update_layers (docs/migration.md)'
    )
    with pytest.warns(UserWarning, match='^%s$' % re.escape(message)):
        own = Own(16, 8)
    assert (own.hidden_channels, own.n_update_layers) == (8, 2)
    with pytest.warns(UserWarning, match='hidden_dim is hidden_channels'):
        unwarned(GGNN, {'hidden_dim': 'hidden_channels'})
        swapped = chainer_bspmm.models.GGNN(16, hidden_dim=8)
    assert swapped.hidden_channels == 8
    assert inspect.signature(GGNN) == inspect.signature(GGNN.__init__.__wrapped__).replace(
        parameters=list(inspect.signature(GGNN.__init__.__wrapped__).parameters.values())[1:]
    )


def test_the_readout_of_ggnn_takes_the_width_that_it_gets():
    """Before 0.6 hidden_dim had no effect; as in_channels it would be too small if there is h0."""
    from chainer_chemistry.links import GGNNReadout

    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        readout = GGNNReadout(out_dim=3, hidden_dim=8)
    h = numpy.ones((2, 5, 8), 'f')
    assert readout(h, h).shape == (2, 3)


SCRIPT = """
import warnings
from chainer_chemistry.models import NFP
try:
    print(NFP(16, hidden_dim=8, n_layers=2).hidden_channels)
except TypeError as error:
    print(error)
"""


def test_only_under_run(tmp_path):
    (tmp_path / 'script.py').write_text(SCRIPT)
    done = python('-m', 'chainer_bspmm', 'run', 'script.py', cwd=tmp_path)
    assert done.stdout == '8\n'
    assert done.stderr.count('script.py:5: UserWarning: NFP: since Chainer Chemistry 0.6') == 1
    (tmp_path / 'script.py').write_text('import chainer_bspmm' + SCRIPT)
    done = python('script.py', cwd=tmp_path)
    assert done.stdout == "NFP.__init__() got an unexpected keyword argument 'hidden_dim'\n"


class OldUpdater(StandardUpdater):
    """Updater as users wrote it for Chainer 5."""

    def __init__(self, iterator, optimizer, device):
        super().__init__(iterator, optimizer)
        self.device = device


@pytest.mark.parametrize('device', [-1, '@numpy', None])
def test_an_updater_may_set_its_device(device):
    script_repairs.updaters_may_set_their_device(
        importlib.import_module('chainer.training.updaters.standard_updater')
    )
    optimizer = optimizers.SGD().setup(chainer.links.Linear(1))
    message = (
        'device: since Chainer 7 it is passed to the constructor of an updater, '
        'super().__init__(..., device=device), not assigned (docs/migration.md)'
    )
    with pytest.warns(UserWarning, match='^%s$' % re.escape(message)):
        updater = OldUpdater(SerialIterator([0], 1), optimizer, device)
    expected = None if device is None else chainer.get_device('@numpy')
    assert updater.device == updater.input_device == expected


def test_migration_has_a_row_for_each():
    page = (ROOT / 'docs' / 'migration.md').read_text()
    for kind, renamed in CLASSES:
        before = ', '.join(name + '=' for name in renamed)
        after = ', '.join(name + '=' for name in renamed.values() if name is not None)
        row = '| `%s(%s)` | %s |' % (
            kind.__name__,
            before,
            '`%s`' % after if after else 'leave it out: it had no effect',
        )
        assert row in page.splitlines(), row
