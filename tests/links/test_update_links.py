"""Update links by themselves, compared with Chainer Chemistry's in every layout; refusals."""

import functools

import numpy
import pytest

import chainer
from chainer import functions
from chainer.backends import cuda
from chainer.link_hooks import TimerHook
from chainer.links import BatchNormalization, StatelessGRU
from chainer_chemistry.links import GraphLinear, GraphMLP

from chainer_bspmm import links, sparsify
from chainer_bspmm.links.inner import UnknownLayer
from chainer_bspmm.links.linear import parameters_of
from chainer_bspmm.sparse import BatchedCSR
from tests.support import device_of, random_matrix, relative_error
from tests.support.cases import pairs
from tests.support.molecules import adjacency
from tests.support.parity import randomised, sparse_link

# (class, kind of adjacency, arguments of the constructor, its options)
LINKS = [
    *(('RSGCNUpdate', 'normalised', (n, 4), {}) for n in (None, 6)),
    *(('RelGCNUpdate', 'relations', (n, n_out), {}) for n in (None, 6) for n_out in (4, 9)),
    *(
        ('GGNNUpdate', 'relations', (n,), options)
        for n, options in (
            (None, {}),
            (6, {'hidden_channels': 6}),
            (6, {'hidden_channels': 4, 'out_channels': 6}),
        )
    ),
    *(
        ('GINUpdate', 'counted', (n,), {'dropout_ratio': 0.0, **options})
        for n in (None, 6)
        for options in (
            {},
            {'out_channels': 3},
            {'dropout_ratio': -1.0},
            {'n_layers': 1},
            {'n_layers': 4, 'hidden_channels': 5},
        )
    ),
    *(
        ('NFPUpdate', kind, (n, 4, max_degree), {})
        for kind in ('counted', 'counted bonds')
        for n in (None, 6)
        for max_degree in (6, 2)
    ),
    *(
        ('GNNFiLMUpdate', 'relations', (6, n_relations, activation), {})
        for n_relations in (1, 5)
        for activation in ('relu', 'tanh', 'softplus')
    ),
    *(
        (
            'RelGATUpdate',
            'relations',
            (n, 4),
            {'n_heads': n_heads, 'softmax_mode': mode, 'concat_heads': concat_heads},
        )
        for (n, n_heads), mode, concat_heads in pairs(
            [(None, 3), (6, 1), (6, 2)], ['across', 'within'], [False, True]
        )
    ),
    ('RelGATUpdate', 'relations', (6, 4), {'negative_slope': 0.7}),
]


def inputs(kind='relations', n_relations=4):
    """Return features and upstream's dense adjacency of two graphs of five nodes."""
    rng = numpy.random.RandomState(0)
    h = rng.uniform(-1, 1, (2, 5, 6)).astype('f')
    return h, numpy.stack([adjacency(rng, 5, kind, n_relations) for _ in range(2)])


def numbers(link):
    """Return the attributes of a link that are numbers, strings, functions or None."""
    kinds = int, float, str, type(functions.relu), type(None)
    own = {name: value for name, value in vars(link).items() if not name.startswith('_')}
    return {name: value for name, value in own.items() if isinstance(value, kinds)}


@pytest.mark.parametrize('name, kind, arguments, options', LINKS, ids=str)
def test_update_link(device, name, kind, arguments, options):
    """Swapped and new links equal upstream's; all rows are atoms, so layouts agree."""
    sparse = getattr(links, name)
    arguments = [getattr(functions, a) if isinstance(a, str) else a for a in arguments]
    h, adj = inputs(kind, arguments[1] if name == 'GNNFiLMUpdate' else 4)
    conditions = []
    if name == 'NFPUpdate':  # upstream's link gets degrees from its model, ours from the batch
        degrees = adj.sum(axis=1)[:, :, None]
        conditions = [
            [numpy.broadcast_to(degrees == d, h.shape) for d in range(1, arguments[2] + 2)]
        ]
    dense = sparse.upstream(*arguments, **options)
    dense(h, adj, *conditions)
    getattr(randomised(dense), 'reset_state', int)()
    if name == 'GNNFiLMUpdate':
        dense.norm_layer.eps = 0.5  # a value that a user has set
    steps = [dense(h, adj, *conditions).array for _ in range(3)]
    assert (steps[0] != steps[1]).all() == (name == 'GGNNUpdate')  # it has a state
    swapped = sparse_link(sparse, dense)
    fresh = sparse(*arguments, **options)
    for link in (swapped, fresh):
        link.to_device(device)
        for layout, shape in (('padded', (2, 5)), ('packed', (10,)), ('padded', (10,))):
            batch = BatchedCSR.from_matrices(list(adj), layout).to_device(device)
            getattr(link, 'reset_state', int)()
            for expected in steps:
                y = link(device.send(h.reshape(shape + (6,))), batch).array
                assert y.shape == shape + expected.shape[-1:]
                if link is swapped:
                    actual = cuda.to_cpu(y).reshape(expected.shape)
                    assert relative_error(actual, expected) < 1e-5
        assert numbers(link) == numbers(dense)
        shapes = [[(path, p.shape) for path, p in each.namedparams()] for each in (link, dense)]
        assert shapes[0] == shapes[1]


def test_first_call_of_relgcn_draws_parameters_as_upstream_does():
    h, adj = inputs()
    pair = links.RelGCNUpdate.upstream(None, 4), links.RelGCNUpdate(None, 4)
    for link, given in zip(pair, (adj, BatchedCSR.from_dense(adj))):
        numpy.random.seed(3)
        link(h, given)
    for dense, sparse in zip(*(link.params() for link in pair)):
        numpy.testing.assert_array_equal(sparse.array, dense.array)


def test_first_call_of_relgat_makes_parameters_as_upstream_does():
    """A user's attention layer, like the message layer, may get its size in the first call."""
    h, adj = inputs()
    pair = links.RelGATUpdate.upstream(None, 4), links.RelGATUpdate(None, 4)
    for link, given in zip(pair, (adj, BatchedCSR.from_dense(adj))):
        replaced(link, 'attention_layer', GraphLinear(None, 1))
        numpy.random.seed(3)
        link(h, given)
    for dense, sparse in zip(*(link.params() for link in pair)):
        numpy.testing.assert_array_equal(sparse.array, dense.array)


@pytest.mark.parametrize('activation', [functions.relu, functions.tanh])
def test_layers_of_gin_that_users_put_there(activation):
    """A user's layers keep their activation, and link hooks run."""
    h, adj = inputs('counted')
    dense = links.GINUpdate.upstream(6, dropout_ratio=0.0, n_layers=3)
    del dense.graph_mlp
    with dense.init_scope():
        dense.graph_mlp = GraphMLP([5, 5, 4], 6, activation)
    expected = randomised(dense)(h, adj).array
    link = sparse_link(links.GINUpdate, dense)
    hook = TimerHook()
    for layer in link.graph_mlp.layers:
        layer.add_hook(hook)
    y = link(h, BatchedCSR.from_matrices(list(adj), 'padded')).array
    assert relative_error(y, expected) < 1e-5
    assert len(hook.call_history) == 3
    for layer in link.graph_mlp.layers:
        layer.delete_hook('TimerHook')
    of_this_thread = TimerHook()
    with of_this_thread:
        link(h, BatchedCSR.from_matrices(list(adj), 'padded'))
    assert len(of_this_thread.call_history) == 4  # three layers and the link itself


def test_state_of_another_batch():
    link = links.GGNNUpdate()
    adj, smaller = (BatchedCSR.from_matrices([numpy.ones((4, n, n), 'f')]) for n in (3, 2))
    link(numpy.ones((3, 16), 'f'), adj)
    with pytest.raises(
        ValueError,
        match=r'state: expected shape \(2, 16\), got \(3, 16\); reset_state\(\) clears the '
        'state of another batch',
    ):
        link(numpy.ones((2, 16), 'f'), smaller)
    link.reset_state()
    assert link(numpy.ones((2, 16), 'f'), smaller).shape == (2, 16)


def test_swap_of_nfp_alone():
    model = sparsify(chainer.ChainList(links.NFPUpdate.upstream(6, 4)))
    assert type(model[0]) is links.NFPUpdate


def check_against_padded(function, xp, n_relations, n_channels):
    """Compare results, gradients and second gradients of a folded and a padded batch in float64.

    ``function(adj, x)`` must have equal results for equal rows.
    """
    rng = numpy.random.RandomState(0)
    matrices = [random_matrix(rng, n, n_relations, density=0.4) for n in (4, 0, 1, 6, 3)]
    folded, padded = (
        BatchedCSR.from_matrices(matrices, layout).to_device(device_of(xp))
        for layout in ('folded', 'padded')
    )
    n = padded.max_rows
    offsets = cuda.to_cpu(folded.row_offsets)
    # Index of the row of the folded batch that stands for each row of the padded batch.
    rows = [numpy.minimum(numpy.arange(a, a + n), b - 1) for a, b in zip(offsets, offsets[1:])]
    copied = xp.asarray(numpy.concatenate(rows))
    x = xp.asarray(rng.uniform(-1, 1, (folded.n_rows, n_channels)))
    results = []
    gy = None
    for is_folded in (True, False):
        h = chainer.Variable(x)
        y = function(folded, h)[copied] if is_folded else function(padded, h[copied])
        if gy is None:
            gy = xp.asarray(rng.uniform(-1, 1, y.shape))
        (single,) = chainer.grad([y], [h], [chainer.Variable(gy)])
        (first,) = chainer.grad([y], [h], [chainer.Variable(gy)], enable_double_backprop=True)
        (second,) = chainer.grad([functions.sum(first * first)], [h])
        results.append([cuda.to_cpu(v.array) for v in (y, single, first, second)])
    for actual, expected in zip(*results):
        assert abs(expected).max() > 1e-3
        numpy.testing.assert_allclose(actual, expected, 1e-10, 1e-10)


@pytest.mark.parametrize(
    'make',
    [
        functools.partial(links.GNNFiLMUpdate, 3, 2, functions.relu),
        functools.partial(links.GNNFiLMUpdate, 3, 2, functions.tanh),
        *(
            functools.partial(
                links.RelGATUpdate, 3, 4, 2, 2, softmax_mode=mode, concat_heads=concat_heads
            )
            for mode in ('across', 'within')
            for concat_heads in (False, True)
        ),
    ],
)
def test_folded(xp, make):
    with chainer.using_config('dtype', numpy.float64):
        link = make()
        link(numpy.ones((2, 3)), BatchedCSR.from_matrices([numpy.ones((2, 2, 2))]))
    if hasattr(link, 'norm_layer'):
        link.norm_layer.beta.array[...] = [1, 2, 3]
    link.to_device(device_of(xp))
    check_against_padded(lambda adj, h: link(h, adj), xp, 2, 3)


def test_a_node_without_neighbours_gets_the_bias_of_the_norm():
    link = links.GNNFiLMUpdate(3, 2)
    adj = BatchedCSR.from_matrices([numpy.zeros((2, 2, 2), 'f')])
    h = numpy.ones((2, 3), 'f')
    link(h, adj)
    link.norm_layer.beta.array[...] = [1, 2, 3]
    numpy.testing.assert_array_equal(link(h, adj).array, [[1, 2, 3]] * 2)


def test_a_node_without_neighbours_gets_the_mean_of_its_graph():
    """The mean is over the atoms in packed batches, over all rows of the graph in padded ones."""
    h = inputs()[0][:1, :4]
    link = links.RelGATUpdate(6, 5, n_heads=1, n_edge_types=1)
    m = functions.linear(h[0], link.message_layer.W).array
    packed = BatchedCSR.from_matrices([numpy.zeros((3, 3), 'f'), numpy.zeros((1, 1), 'f')])
    y = link(h[0], packed).array
    numpy.testing.assert_allclose(y[:3], numpy.tile(m[:3].mean(axis=0), (3, 1)), rtol=1e-5)
    numpy.testing.assert_allclose(y[3], m[3], rtol=1e-5)
    padded = BatchedCSR.from_matrices([numpy.zeros((4, 4), 'f')], 'padded')
    y = link(h, padded).array[0]
    numpy.testing.assert_allclose(y, numpy.tile(m.mean(axis=0), (4, 1)), rtol=1e-5)


@pytest.mark.parametrize('values', [1.0, 1e-3, -2.0, 1e9])
def test_values_of_the_adjacency_play_no_part_in_attention(values):
    h, adj = inputs()
    dense = links.RelGATUpdate.upstream(6, 4)
    expected = dense(h, adj).array
    batch = BatchedCSR.from_matrices(list(adj * numpy.float32(values)))
    y = sparse_link(links.RelGATUpdate, dense)(h.reshape(10, 6), batch).array
    assert relative_error(y.reshape(expected.shape), expected) < 1e-5


@pytest.mark.parametrize('mode', ['across', 'within'])
def test_large_logits(mode):
    """One edge gets all the weight; logits stay above the dense link's logits of absent edges."""
    h, adj = inputs()
    dense = links.RelGATUpdate.upstream(6, 4, softmax_mode=mode)
    for scale in (1e3, 3e3):
        dense.attention_layer.W.array[...] = scale * numpy.linspace(-1, 1, 8)
        expected = dense(h, adj).array
        link = sparse_link(links.RelGATUpdate, dense)
        y = link(h.reshape(10, 6), BatchedCSR.from_matrices(list(adj)))
        assert relative_error(y.array.reshape(expected.shape), expected) < 1e-4


def test_dropout_in_training_alone():
    h, adj = inputs()
    link = links.RelGATUpdate(6, 4, dropout_ratio=0.5)
    batch = BatchedCSR.from_matrices(list(adj))
    assert not numpy.array_equal(*(link(h.reshape(10, 6), batch).array for _ in range(2)))
    with chainer.using_config('train', False):
        assert numpy.array_equal(*(link(h.reshape(10, 6), batch).array for _ in range(2)))


@pytest.mark.parametrize('ratio', [0.25, 0.75])
def test_attention_that_dropout_keeps_is_scaled(ratio):
    """All attention of an atom is on its one neighbour, so its message is kept as a whole."""
    link = links.RelGATUpdate(6, 4, n_heads=1, n_edge_types=1, dropout_ratio=ratio)
    h = numpy.random.RandomState(0).uniform(-1, 1, (200, 6)).astype('f')
    messages = functions.linear(h, link.message_layer.W, link.message_layer.b).array
    pair = numpy.array([[0, 1], [1, 0]], 'f')
    numpy.random.seed(0)
    y = link(h, BatchedCSR.from_matrices([pair] * 100)).array
    kept = y.any(axis=1)
    assert abs(kept.mean() - (1 - ratio)) < 0.15
    of_neighbours = messages.reshape(100, 2, 4)[:, ::-1].reshape(200, 4)
    numpy.testing.assert_allclose(y[kept], of_neighbours[kept] / (1 - ratio), rtol=1e-5)


def replaced(dense, name, link):
    """Return a link with another child."""
    delattr(dense, name)
    with dense.init_scope():
        setattr(dense, name, link)
    return dense


def nfp_with_a_hook():
    link = links.NFPUpdate(6, 4)
    link.graph_linears[3].add_hook(TimerHook())
    return link


@pytest.mark.parametrize(
    'kind, arguments, name, part, message',
    [
        (
            'GNNFiLM',
            (3,),
            'norm_layer',
            BatchNormalization(3),
            'expected exactly a LayerNormalization .* got a .*BatchNormalization. .* Unswapped',
        ),
        (
            'GGNN',
            (6,),
            'update_layer',
            StatelessGRU(22, 16),
            'expected exactly a GRU .* got a .*StatelessGRU. .* Unswapped',
        ),
        *(
            (
                'RelGAT',
                (6, 4),
                name,
                BatchNormalization(3),
                'expected exactly a GraphLinear .* got a .*BatchNormalization. .* Unswapped',
            )
            for name in ('message_layer', 'attention_layer')
        ),
    ],
)
def test_parts_without_a_sparse_form(kind, arguments, name, part, message):
    kind = getattr(links, kind + 'Update')
    with pytest.raises(ValueError, match='%s: %s' % (name, message)):
        sparse_link(kind, replaced(kind.upstream(*arguments), name, part))


@pytest.mark.parametrize(
    'activation, is_one', [(None, True), (functions.relu, True), (functions.tanh, False)]
)
def test_a_convolution_with_a_rectifier_or_none_is_one_node(activation, is_one):
    h, adj = inputs('normalised')
    h = chainer.Variable(h.reshape(10, 6))
    y = links.RSGCNUpdate(6, 3)(h, BatchedCSR.from_dense(adj), activation=activation)
    assert (y.rank == 1) == is_one


def test_unknown_softmax_mode():
    message = "softmax_mode: expected .*'across', 'within'.*'over'"
    with pytest.raises(ValueError, match=message):
        links.RelGATUpdate(5, 4, softmax_mode='over')
    link = links.RelGATUpdate(5, 4)
    link.softmax_mode = 'over'
    adj = BatchedCSR.from_dense(numpy.ones((1, 4, 2, 2), 'f'))
    with pytest.raises(ValueError, match=message):
        link(numpy.zeros((2, 5), 'f'), adj)


DENSE = numpy.ones((1, 4, 2, 2), 'f')
relgat = functools.partial(links.RelGATUpdate, 5, 4)
relgcn = functools.partial(links.RelGCNUpdate, 5, 4)
rsgcn = functools.partial(links.RSGCNUpdate, 5, 4)
film = functools.partial(links.GNNFiLMUpdate, 5)


@pytest.mark.parametrize(
    'make, shape, adj, error, message',
    [
        *(
            (
                make,
                (2, 5),
                3,
                ValueError,
                'adj: expected %d relations, .* got <BatchedCSR.* 3 relations.*>' % n,
            )
            for make, n in ((links.GGNNUpdate, 4), (relgcn, 4), (relgat, 4), (film, 5))
        ),
        *(
            (
                make,
                (1, 2, 5),
                DENSE,
                TypeError,
                'adj: expected a BatchedCSR, got ndarray .*_mols, arrays with '
                'BatchedCSR.from_dense',
            )
            for make in (relgat, film)
        ),
        (
            rsgcn,
            (2, 5),
            4,
            ValueError,
            '^adj: expected a matrix of one relation, with a column for each node, got '
            '<BatchedCSR.*>',
        ),
        (nfp_with_a_hook, (2, 6), 1, ValueError, '3: expected no link hooks, .* TimerHook'),
        (relgat, (3, 5), 4, ValueError, r'h: expected a row .* got shape \(3, 5\)'),
        (relgat, (1, 2, 5), 4, ValueError, r'h: expected a row .* got shape \(1, 2, 5\)'),
    ],
)
def test_bad_input(make, shape, adj, error, message):
    """`adj` is a matrix, or its number of relations."""
    if isinstance(adj, int):
        adj = BatchedCSR.from_matrices([numpy.ones((adj, 2, 2), 'f')])
    with pytest.raises(error, match=message):
        make()(numpy.ones(shape, 'f'), adj)


@pytest.mark.parametrize('name', ['forward', '__call__'])
def test_a_layer_whose_class_was_patched_is_refused(monkeypatch, name):
    layer = chainer.links.Linear(3, 2)
    parameters_of(layer, 3)
    monkeypatch.setattr(chainer.links.Linear, name, lambda self, x: 2 * x)
    with pytest.raises(UnknownLayer, match='expected exactly a GraphLinear or Linear'):
        parameters_of(layer, 3)


def test_a_gru_whose_base_was_patched_is_refused(monkeypatch):
    """`GRU.forward` calls that of StatefulGRU."""
    link = links.GGNNUpdate(4, 4, n_edge_types=1)
    h = numpy.ones((2, 4), 'f')
    adj = BatchedCSR.from_matrices([numpy.ones((1, 2, 2), 'f')])
    link(h, adj)
    forward = chainer.links.StatefulGRU.forward
    monkeypatch.setattr(chainer.links.StatefulGRU, 'forward', lambda self, x: 2 * forward(self, x))
    with pytest.raises(UnknownLayer, match='update_layer: expected exactly a GRU'):
        link(h, adj)
