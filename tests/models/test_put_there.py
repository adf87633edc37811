"""Layers, callables and numbers that a user puts into a model: upstream's answer, or a refusal.

The cases are generated. Every attribute of every link of every model is changed if it holds a link,
a callable or a number, once before `sparsify` and once after it. Links get a subclass that doubles
the result, callables are replaced by ones that double theirs, and numbers by other numbers.
"""

import collections
import copy
import functools
import re

import numpy
import pytest

import chainer
from chainer_chemistry import models as dense
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import GraphLinear
from chainer_chemistry.links.readout.set2set import Set2Set
from chainer_chemistry.models import MLP
from chainer_chemistry.models.gwm import gwm_net
from chainer_chemistry.models.prediction import GraphConvPredictor, Regressor

from chainer_bspmm import concat_mols, CSRConverter, links, models, sparsify
from chainer_bspmm.dataset import to_sparse
from tests.support import parity, relative_error
from tests.support.molecules import molecules

SIZES = (4, 6, 3)

# Besides the defaults of every model: options with other layers, and models for lists of edges.
OPTIONS = {
    ('RSGCN', 'batch norm'),
    ('RSGCN', 'activated readout'),
    ('RelGCN', 'features'),
    ('GINSparse', 'defaults'),
    ('RelGCNSparse', 'defaults'),
    ('RelGCNSparse', 'features'),
    ('RSGCN_GWM', 'batch norm'),
    ('GGNN_GWM', 'activated'),
}
FAMILIES = ('RSGCN', 'NFP', 'GIN', 'GGNN', 'RelGCN', 'RelGAT', 'GNNFiLM')
CASES = {
    '%s, %s' % (case.model, case.options): case._replace(sizes=SIZES)
    for case in parity.ALL_CASES
    if case is parity.DEFAULTS.get(case.model) or (case.model, case.options) in OPTIONS
}

# Options that are strings -> another value
STRINGS = {'mode': 'max', 'softmax_mode': 'within'}

Outcome = collections.namedtuple('Outcome', 'place change kind detail')


def smaller(case):
    """Return a case with two layers, if its model takes the number of layers."""
    try:
        make = functools.partial(case.make, n_update_layers=2)
        make()
    except (TypeError, ValueError):
        return case
    return case._replace(make=make)


def model_of(case):
    examples = parity.examples_of(case)
    model = parity.initialised(smaller(case).make, examples)
    if case.adjacency.startswith('edges'):
        batch = CSRConverter('packed')(to_sparse(examples, case.n_relations))
        return model, parity.dense_batch(examples), batch
    if case.model in FAMILIES:
        numpy.random.seed(1)
        model = GraphConvPredictor(model, MLP(2, 4))
        model(*dense_concat_mols(examples))
    return model, dense_concat_mols(examples), parity.converters_of(case)['folded'](examples)


def doubled(values):
    # The sign changes, too, which a rectifier cannot hide.
    return tuple(-2 * v for v in values) if isinstance(values, tuple) else -2 * values


def subclass(kind, method):
    """Return a subclass whose `method` (``__call__`` or ``forward``) doubles the result."""

    def call(self, *args, **kwargs):
        return doubled(getattr(super(own, self), method)(*args, **kwargs))

    own = type('Doubled' + kind.__name__, (kind,), {method: call})
    return own


def double_class(method, link):
    link.__class__ = subclass(type(link), method)


def double_instance(link):
    forward = link.forward
    link.forward = lambda *args, **kwargs: doubled(forward(*args, **kwargs))


def set_attribute(name, value, link):
    setattr(link, name, value)


def changes_of(link):
    """Yield names of changes of a link, and functions that make the changes in such a link."""
    if not isinstance(link, (chainer.ChainList, chainer.Sequential)):
        for method in ('__call__', 'forward'):
            if hasattr(type(link), method):
                yield 'class, ' + method, functools.partial(double_class, method)
        if hasattr(link, 'forward'):
            yield 'forward of the object', double_instance
    for name, value in sorted(vars(link).items()):
        if name.startswith('_') or name in ('name', 'trained_with') or isinstance(value, type):
            continue
        others = ()
        if isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, int):
            others = (value + 1, value - 1)
        elif isinstance(value, float):
            others = (value * 2 + 0.25, value / 2 - 0.25)
        elif isinstance(value, str) and name in STRINGS:
            others = (STRINGS[name],)
        elif callable(value) and not isinstance(value, (chainer.Link, chainer.Parameter)):
            others = (lambda *args, value=value: doubled(value(*args)), chainer.functions.softmax)
        elif value is None and name == 'activation':
            others = (chainer.functions.tanh, chainer.functions.softmax)
        for i, other in enumerate(others):
            yield '%s %d' % (name, i), functools.partial(set_attribute, name, other)


def at(model, path):
    return dict(model.namedlinks())[path]


def answer(model, batch):
    """Return the result of a model, or its error."""
    try:
        with (
            chainer.no_backprop_mode(),
            chainer.using_config('train', False),
            numpy.errstate(all='ignore'),
        ):
            return model(*batch).array
    except Exception as error:
        return error


def is_equal(actual, expected):
    if actual.shape != expected.shape:
        return False
    scale = max(numpy.abs(expected).max(initial=0), 1e-3)
    return numpy.allclose(actual, expected, atol=1e-4 * scale, rtol=1e-3, equal_nan=True)


def judged(place, change, actual, expected, before):
    """Return the outcome of a case; the kind 'silent' is a fault."""
    if isinstance(expected, Exception):
        return Outcome(place, change, 'dense fails', repr(expected))
    if isinstance(actual, Exception):
        is_told = any(word in str(actual) for word in ('expected', 'derive it from', 'sparsify'))
        return Outcome(place, change, 'refused' if is_told else 'cryptic', repr(actual))
    if not is_equal(actual, expected):
        return Outcome(
            place, change, 'silent', '%s, not %s' % (actual.ravel()[:2], expected.ravel()[:2])
        )
    # The kind 'called' means that the change has the same effect on upstream's answer and on ours.
    return Outcome(place, change, 'equal' if is_equal(before, expected) else 'called', '')


def outcomes(case):
    """Return the `Outcome` of every change of a model, before and after the swap."""
    model, dense_batch, sparse_batch = model_of(case)
    swapped = sparsify(copy.deepcopy(model))
    before = answer(model, dense_batch)
    assert is_equal(answer(swapped, sparse_batch), before)

    def swap_and_call(changed):
        try:
            return answer(sparsify(changed), sparse_batch)
        except ValueError as error:
            return error

    found = []
    for path, link in model.namedlinks():
        for name, change in changes_of(link):
            changed = copy.deepcopy(model)
            change(at(changed, path))
            expected = answer(changed, dense_batch)
            found.append(judged(path, name, swap_and_call(changed), expected, before))

            changed = copy.deepcopy(swapped)
            change(at(changed, path))
            actual = answer(changed, sparse_batch)
            found.append(judged(path, name + ', later', actual, expected, before))
        if path != '/' and type(at(swapped, path)) is not type(link):
            changed = copy.deepcopy(swapped)
            at(changed, path).__class__ = type(link)
            actual = answer(changed, sparse_batch)
            found.append(judged(path, 'dense, later', actual, before, before))
    kinds = {type(link) for link in model.links()} - {chainer.ChainList, GraphConvPredictor}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        for method in ('__call__', 'forward'):
            if not hasattr(kind, method):
                continue
            changed = copy.deepcopy(model)
            with pytest.MonkeyPatch.context() as patch:
                call = getattr(kind, method)
                patch.setattr(
                    kind, method, lambda *args, call=call, **kw: doubled(call(*args, **kw))
                )
                expected = answer(model, dense_batch)
                actual = swap_and_call(changed)
                later = answer(swapped, sparse_batch)
            found.append(judged(kind.__name__, method + ' patched', actual, expected, before))
            found.append(judged(kind.__name__, method + ' patched later', later, expected, before))
    assert is_equal(answer(swapped, sparse_batch), before)
    return found


QUICK = (
    'RSGCN, batch norm',
    'GIN, defaults',
    'GGNN, defaults',
    'RelGAT, defaults',
    'GNNFiLM, defaults',
    'RelGCNSparse, features',
    'RelGCN_GWLE, defaults',
)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    'name',
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_the_dense_models_answer_or_a_refusal(name):
    found = outcomes(CASES[name])
    faults = [outcome for outcome in found if outcome.kind in ('silent', 'cryptic')]
    assert not faults, '\n'.join(map(str, faults))
    counts = collections.Counter(outcome.kind for outcome in found)
    print('%s: %d cases, %s' % (name, len(found), dict(sorted(counts.items()))))
    assert min(counts[kind] for kind in ('refused', 'called', 'equal')) > 5


# --- messages ---


class Halved(GraphLinear):
    def __call__(self, x):
        return 0.5 * super().__call__(x)


def rsgcn():
    return dense.RSGCN(4, hidden_channels=4, n_update_layers=2, dropout_ratio=0.0)


def put(model, layer):
    """Put a layer into the first update of an RSGCN."""
    update = model.gconvs[0]
    del update.graph_linear
    with update.init_scope():
        update.graph_linear = layer


REFUSAL = (
    '%sgconvs.0.graph_linear: expected exactly a GraphLinear or Linear as Chainer or Chainer '
    'Chemistry defines it, got a %s. A sparse batch is computed with the parameters of this layer, '
    "but its code does not run. Unswapped, with upstream's converter, the model runs as it is: "
    'python -m chainer_bspmm run SCRIPT.py'
)
EXAMPLES = molecules((5, 3), 'normalised')
BATCH = concat_mols(EXAMPLES)[:2]
OF_HALVED = '%s.Halved' % __name__


def message_of(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def test_sparsify_names_the_layer():
    model = Regressor(GraphConvPredictor(rsgcn()))
    put(model.predictor.graph_conv, Halved(4, 4, nobias=True))
    expected = REFUSAL % ('model.predictor.graph_conv.', OF_HALVED)
    assert message_of(lambda: sparsify(model)) == expected


def test_the_next_call_names_the_layer():
    model = sparsify(rsgcn())
    put(model, Halved(4, 4, nobias=True))
    assert message_of(lambda: model(*BATCH)) == REFUSAL % ('RSGCN.', OF_HALVED)


def test_what_is_no_link():
    model = sparsify(rsgcn())
    put(model, lambda x: x)
    assert message_of(lambda: model(*BATCH)) == REFUSAL % ('RSGCN.', 'builtins.function')


def test_a_layer_whose_object_was_patched():
    model = rsgcn()
    layer = model.gconvs[0].graph_linear
    layer.forward = lambda x: x
    kind = 'chainer_chemistry.links.connection.graph_linear.GraphLinear'
    expected = REFUSAL % ('model.', kind + ' whose forward pass was replaced')
    assert message_of(lambda: sparsify(model)) == expected


def test_an_update_link_by_itself_names_its_layer():
    update = sparsify(dense.RSGCN(4).gconvs[0])
    own = Halved(32, 4, nobias=True)
    own.name = 'mine'
    update.__dict__['graph_linear'] = own
    h = numpy.zeros((BATCH[1].n_rows, 32), 'f')
    expected = (REFUSAL % ('', OF_HALVED)).replace('gconvs.0.graph_linear', 'mine')
    assert message_of(lambda: update(h, BATCH[1])) == expected


@pytest.mark.parametrize('when', ['before', 'after'])
def test_a_class_that_was_patched(monkeypatch, when):
    model = rsgcn()
    if when == 'after':
        sparsify(model)
    monkeypatch.setattr(dense.RSGCN, '__call__', lambda self, atoms, adj: atoms)
    message = message_of(lambda: sparsify(model) if when == 'before' else model(*BATCH))
    assert message == (
        '%s: expected RSGCN as Chainer Chemistry defines it, got a class whose forward pass was '
        'replaced. On a sparse batch the code of this class does not run. Unswapped, with '
        "upstream's converter, the model runs as it is: python -m chainer_bspmm run SCRIPT.py"
        % ('model' if when == 'before' else 'RSGCN')
    )


def test_a_class_that_a_model_does_not_have_may_be_patched(monkeypatch):
    model = sparsify(gwm_net.GGNN_GWM(16, 16, n_update_layers=1))
    monkeypatch.setattr(links.RSGCNUpdate.upstream, '__call__', lambda self, h, adj: h)
    example = (*molecules((5,))[0][:2], numpy.ones(4, 'f'))
    assert model(*concat_mols([example])).shape == (1, 16)


def test_a_subclass_of_ours_calls_its_own_layers():
    class Mine(links.RSGCNUpdate):
        def _update(self, h, adj, activation=None, dropout_ratio=0.0):
            return self.graph_linear(h[None])[0]

    model = models.RSGCN(4, hidden_channels=4, n_update_layers=1)
    put(model, Halved(4, 4, nobias=True))
    model.gconvs[0].__class__ = Mine
    assert sparsify(model)(*BATCH).shape == (2, 4)


def test_a_softmax_of_atoms():
    """Upstream's softmax is over the atoms; one over the channels is another function."""
    readout = links.GeneralReadout(activation=chainer.functions.softmax)
    with pytest.raises(ValueError) as caught:
        readout(numpy.ones((BATCH[1].n_rows, 2), 'f'), BATCH[1])
    assert str(caught.value) == (
        'activation: expected a function of each element, got softmax, which Chainer Chemistry '
        "applies along the atoms of a padded molecule. Unswapped, with upstream's converter, the "
        'model runs as it is: python -m chainer_bspmm run SCRIPT.py'
    )


class OwnEmbed(chainer.Link):
    """An embedding that has no table W."""

    def __init__(self, n_channels):
        super().__init__()
        self.n_channels = n_channels

    def __call__(self, ids):
        ids = chainer.backend.get_array_module(ids).asarray(ids)[..., None]
        return chainer.Variable((ids * numpy.arange(1, 1 + self.n_channels) % 7).astype('f'))


def with_embed(model, embed):
    del model.embed
    with model.init_scope():
        model.embed = embed
    return model


EMBEDS = {
    "of one's own": lambda: OwnEmbed(4),
    'that ignores an id': lambda: chainer.links.EmbedID(118, 4, ignore_label=EXAMPLES[0][0][0]),
}


@pytest.mark.parametrize('make', EMBEDS.values(), ids=EMBEDS)
@pytest.mark.parametrize('layout', ['folded', 'padded'])
def test_an_embedding_that_is_called(layout, make):
    model = with_embed(rsgcn(), make())
    expected = model(*dense_concat_mols(EXAMPLES)[:2]).array
    actual = sparsify(model)(*CSRConverter(layout)(EXAMPLES)[:2]).array
    assert relative_error(actual, expected) < 1e-5


def test_an_embedding_with_a_hook():
    model = sparsify(rsgcn())
    hook = chainer.link_hooks.TimerHook()
    model.embed.add_hook(hook)
    model(*BATCH)
    assert len(hook.call_history) == 1


def test_an_embedding_of_ones_own_that_reduces_atoms():
    model = sparsify(rsgcn())
    del model.embed
    model.embed = lambda ids: chainer.Variable(numpy.ones((2, 4), 'f'))
    assert re.fullmatch(
        r"embed: expected features of shape \(10, 'channels'\) from ids of shape \(10,\), got "
        r'\(2, 4\) of <function .*>',
        message_of(lambda: model(*BATCH)),
    )


def test_a_head_for_atoms():
    """A layer for atoms of upstream's gets the rows of a swapped model."""
    message = message_of(lambda: GraphLinear(4, 1)(numpy.ones((10, 4), 'f')))
    assert message == (
        'GraphLinear: expected features of shape (n_graphs, N, channels), got (10, 4). If these '
        "are the rows of a sparse batch, CSRConverter('padded') keeps the atoms of each molecule "
        'apart, as the dense model has them'
    )


def test_dropout_of_an_lstm_that_was_set_later():
    example = molecules((5,))
    model = dense.MPNN(3, hidden_channels=4, message_func='ggnn')
    for readout in model.readout_layers:
        readout.set2set = Set2Set(in_channels=4, n_layers=2)
        readout.set2set.lstm_layer.dropout = 0.5
    model(*dense_concat_mols(example)[:2])  # makes the parameters
    results = []
    for batch in (dense_concat_mols(example), concat_mols(example)):
        numpy.random.seed(3)
        results.append(model(*batch[:2]).array)
        sparsify(model)
    assert relative_error(results[1], results[0]) < 1e-5


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', CASES)
def test_layers_without_a_bias(name):
    """Each layer in turn, and all of them, lose the bias; upstream's answers do not change."""
    model, dense_batch, sparse_batch = model_of(CASES[name])
    rng = numpy.random.RandomState(0)
    paths = []
    for path, link in model.namedlinks():
        if isinstance(link, (GraphLinear, chainer.links.Linear)) and link.b is not None:
            link.b.array[...] = rng.uniform(-1, 1, link.b.shape)
            paths.append(path)
    for without in [*([path] for path in paths), paths]:
        changed = copy.deepcopy(model)
        for path in without:
            del at(changed, path).b
            at(changed, path).b = None
        expected = answer(changed, dense_batch)
        actual = answer(sparsify(changed), sparse_batch)
        assert not isinstance(actual, Exception), (without, actual)
        assert is_equal(actual, expected), without
