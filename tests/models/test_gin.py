"""GIN: features of nodes, dropout, widths that are refused; GINSparse."""

import functools

import numpy
import pytest

import chainer
from chainer.backends import cuda
from chainer.link_hooks import TimerHook
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.dataset.graph_dataset.base_graph_dataset import SparseGraphDataset
from chainer_chemistry.models import GIN as DenseGIN
from chainer_chemistry.models.gin import GINSparse as DenseGINSparse

from chainer_bspmm import concat_mols, CSRConverter, sparsify
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.links import GINUpdate
from chainer_bspmm.models import GIN, layout_of
from tests.support import draw_as_chainer, parity, relative_error
from tests.support.graph_data import edge_lists, outcome
from tests.support.molecules import molecules
from tests.support import assert_close_arrays


PACKED = CSRConverter('packed')


def test_node_embedding(device):
    """Embeddings may be wider or narrower than layers; equal widths are in test_parity.py."""
    examples = [example[:2] for example in molecules((5, 1, 9), 'counted')]
    dense = parity.initialised(lambda: DenseGIN(3, True, out_channels=5), examples)
    model = parity.swapped(dense, device)
    with chainer.using_config('train', False):
        expected = dense(*dense_concat_mols(examples)).array
        actual = model(*CSRConverter('padded')(examples, device)).array
        assert expected.shape == (3, 9, 5)
        assert relative_error(actual, expected) < 1e-5
        expected = numpy.concatenate([dense(*dense_concat_mols([e])).array[0] for e in examples])
        assert relative_error(model(*PACKED(examples, device)).array, expected) < 1e-5


class Lowered(GINUpdate):
    """A user's update, whose results may be negative."""

    def _update(self, h, adj):
        return super()._update(h, adj) - 1


@pytest.mark.parametrize('n_updates', [1, 3])
def test_features_of_nodes_are_rectified_after_all_updates_of_a_user_but_the_last(n_updates):
    examples = [example[:2] for example in molecules((5, 1, 9), 'counted')]
    atoms, adj = PACKED(examples)
    model = GIN(
        6, node_embedding=True, hidden_channels=6, n_update_layers=n_updates, dropout_ratio=0.0
    )
    model(atoms, adj)
    for update in model.update_layers:
        update.__class__ = Lowered
    h = model.embed(atoms)
    for i, update in enumerate(model.update_layers):
        h = update(chainer.functions.relu(h) if i else h, adj)
    y = model(atoms, adj).array
    assert y.min() < 0 and relative_error(y, h.array) < 1e-5


@pytest.mark.parametrize('ratio', [0.5, 0.1])
def test_dropout_is_upstreams(monkeypatch, ratio):
    make = functools.partial(DenseGIN, 3, dropout_ratio=ratio, hidden_channels=8)
    examples = [example[:2] for example in molecules([7] * 5, 'counted')]
    parity.assert_same_in_training(monkeypatch, make, examples)


def test_dropout_behind_a_hook_is_upstreams(monkeypatch):
    """A hook has to see every call of the layers."""
    make = functools.partial(DenseGIN, 3, dropout_ratio=0.3, hidden_channels=8)
    examples = [example[:2] for example in molecules([7] * 5, 'counted')]
    with TimerHook():
        parity.assert_same_in_training(monkeypatch, make, examples)


def test_dropout_is_applied_in_training_only():
    model = GIN(3)
    batch = concat_mols(molecules([7] * 5, 'counted'))[:2]
    model(*batch)  # makes parameters from random numbers
    assert (model(*batch).array != model(*batch).array).any()
    with chainer.using_config('train', False):
        assert (model(*batch).array == model(*batch).array).all()


@pytest.mark.parametrize('is_cleared', [False, True])
def test_first_mlp_gets_zeros_in_the_first_call(device, is_cleared):
    """Weights that stay None would break optimizers, and drawing them would change later draws."""
    model = GIN(3)
    assert model.first_mlp.layers[0].W.array is None
    model.to_device(device)
    if is_cleared:
        model.cleargrads()
    chainer.functions.sum(model(*concat_mols(molecules((3, 2), 'counted'), device)[:2])).backward()
    W = model.first_mlp.layers[0].W
    assert W.shape == (16, 16) and not cuda.to_cpu(W.array).any() and W.grad is None


@pytest.mark.parametrize(
    'options, message',
    [
        (
            {},
            "out_channels: expected hidden_channels = 16, the width that the readout's parameters "
            'have, got 5',
        ),
        (
            {'node_embedding': True, 'weight_tying': True},
            'out_channels: expected hidden_channels = 16, the width that the tied update takes, '
            'got 5',
        ),
    ],
)
def test_out_channels_that_do_not_fit(options, message):
    for make in (GIN, lambda *a, **k: sparsify(DenseGIN(*a, **k))):
        with pytest.raises(ValueError, match=r'^(model\.)?%s$' % message):
            make(3, out_channels=5, **options)


def test_out_channels_of_one_tied_update():
    """The widths may differ, because a single update is not applied to its own result."""
    GIN(3, out_channels=5, node_embedding=True, weight_tying=True, n_update_layers=1)


def test_features_of_any_width(device):
    """Features may have any width with node_embedding; upstream's readout takes only one width."""
    examples = [(numpy.random.RandomState(0).rand(7, 11).astype('f'), numpy.eye(7, dtype='f'))]
    dense = DenseGIN(3, True, dropout_ratio=0.0)
    with chainer.no_backprop_mode():
        expected = dense(*dense_concat_mols(examples)).array[0]
    model = parity.swapped(dense, device)
    assert relative_error(model(*PACKED(examples, device)).array, expected) < 1e-5
    with pytest.raises(
        ValueError, match=r'atom_array: expected features of 16 channels, got shape \(7, 11\)'
    ):
        GIN(3)(*PACKED(examples))


def sparse_pair(data, device, ratio=0.0, **options):
    """Return upstream's GINSparse and ours with equal random parameters, and a batch for each."""
    batch = SparseGraphDataset(data).converter(data, -1)
    numpy.random.seed(0)
    dense = DenseGINSparse(3, dropout_ratio=ratio, **options)
    dense(batch)
    parity.randomised(dense)
    return dense, parity.swapped(dense, device), batch, PACKED(to_sparse(data), device)


def test_dropout_of_a_list_of_edges_is_upstreams(monkeypatch):
    draw_as_chainer(monkeypatch)
    dense, model, batch, ours = sparse_pair(
        edge_lists([9, 5]), chainer.get_device('@numpy'), 0.5, hidden_channels=8
    )
    numpy.random.seed(0)
    expected = outcome(dense, dense(batch))
    numpy.random.seed(0)
    found = outcome(model, model(*ours))
    assert_close_arrays(found, expected)


def test_gin_sparse_remembers_its_training_on_lists_of_edges():
    data = edge_lists([5, 3])
    dense, _, batch, _ = sparse_pair(data, chainer.get_device('@numpy'))
    optimizer = chainer.optimizers.SGD().setup(dense)
    optimizer.update(lambda: chainer.functions.sum(dense(batch)))
    assert layout_of(sparsify(dense)) == ('packed', None)


@pytest.mark.parametrize(
    'inputs, error, message',
    [
        (
            (SparseGraphDataset(edge_lists([3])),),
            TypeError,
            'GINSparse: expected node features and a BatchedCSR, which '
            r"CSRConverter\('packed'\) makes of dataset.to_sparse\(data\), got only a "
            'SparseGraphDataset',
        ),
        (
            concat_mols(to_sparse(edge_lists([3]))),
            ValueError,
            'adj: expected a packed batch, .* because GINSparse .* pads nothing, got '
            r'.*folded\), 4 x 4, 1 relation, 6 entries, ones on @numpy>',
        ),
        (
            CSRConverter('padded')(to_sparse(edge_lists([3]))),
            ValueError,
            'adj: expected a packed batch, .* because GINSparse .* pads nothing, got .*padded.*>',
        ),
        (
            PACKED(to_sparse(edge_lists([3], 2), n_edge_types=2)),
            ValueError,
            'adj: expected a matrix of one relation, with a column for each node, got '
            '<BatchedCSR.*>',
        ),
    ],
    ids=['graph data', 'folded', 'padded', 'two relations'],
)
def test_inputs_that_gin_sparse_refuses(inputs, error, message):
    with pytest.raises(error, match=message):
        sparsify(DenseGINSparse(3))(*inputs)


def test_gin_sparse_without_a_sparse_form():
    with pytest.raises(
        ValueError,
        match='model.concat_hidden: expected False, got True, with which Chainer Chemistry '
        'fails in its forward pass',
    ):
        sparsify(DenseGINSparse(3, concat_hidden=True))
