"""Models with every option that Chainer Chemistry can run, and their comparison with ours.

Outputs, and the gradient of every parameter, are compared: packed batches with single molecules,
folded and padded batches with the dense batch, lists of edges with upstream's batch of them. The
truth is the dense model in float64, and the bound of an error depends on the dense model's own
error in float32.
"""

import collections
import contextlib
import copy
import functools
import re
import unittest.mock

import chainer_bspmm
import chainer
from chainer import functions
from chainer.backends import cuda
from chainer_chemistry import models
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.dataset.graph_dataset.base_graph_dataset import SparseGraphDataset
from chainer_chemistry.links import GeneralReadout
from chainer_chemistry.links.readout.ggnn_readout import GGNNReadout
from chainer_chemistry.links.update.ggnn_update import GGNNUpdate
from chainer_chemistry.links.update.relgcn_update import RelGCNUpdate
from chainer_chemistry.models.cwle import cwle_net
from chainer_chemistry.models.cwle.cwle_graph_conv_model import CWLEGraphConvModel
from chainer_chemistry.models.gin import GINSparse
from chainer_chemistry.models.gwle import gwle_net
from chainer_chemistry.models.gwm import gwm_net
from chainer_chemistry.models.gwm.gwm_graph_conv_model import GWMGraphConvModel
from chainer_chemistry.models.relgcn import RelGCNSparse
import numpy

from chainer_bspmm import CSRConverter
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.sparse.check import LAYOUTS
from tests.support import draw_as_chainer
from tests.support.graph_data import edge_lists
from tests.support.molecules import adjacency, folded_mask_of, mask_of, SIZES

EQUAL_SIZES = (11,) * 6  # no phantom atoms
N_LABELS = 40
FLOAT32, OWN_ERRORS, FLOAT64 = 1e-5, 3, 1e-10

# Activation of readouts, also of sums. If it saturated, gradients would be mostly rounding.
ACTIVATION = functions.leaky_relu

COLUMNS = ('upstream', 'ours', 'ours float64')  # errors that :func:`compare` returns

# A gradient below this share of the norm of all gradients, in float64, is 0 apart from rounding,
# such as that of a bias before a softmax. Its error is relative to the norm of all gradients.
ZERO = 1e-9


# --- cases ---

# model, options: their names
# make: function that makes Chainer Chemistry's model
# adjacency: kind of the matrices, 'features' if nodes have features instead of ids; 'edges' or
#     'edges, features' for lists of edges, which upstream packs
# column: 'super' (a super node) or 'labels' (of nodes), which follows the adjacency; or None
# sizes: numbers of atoms
# packed_sizes: numbers of atoms in packed batches, equal if a result depends on other molecules
# masked: whether the model is also compared with is_real_node
Case = collections.namedtuple(
    'Case', 'model options make adjacency n_relations column sizes packed_sizes masked'
)


def new_case(
    model,
    options,
    kind,
    adjacency,
    n_relations=1,
    column=None,
    masked=False,
    one_size=False,
    **given,
):
    """Return a `Case` of a kind of model that is made with the `given` arguments.

    one_size: whether all molecules have the same number of atoms.
    """
    sizes = EQUAL_SIZES if one_size else SIZES
    return Case(
        model=model,
        options=options,
        make=functools.partial(kind, **given),
        adjacency=adjacency,
        n_relations=given.get('n_edge_types', n_relations),
        column=column,
        sizes=sizes,
        packed_sizes=EQUAL_SIZES if given.get('use_batch_norm') else sizes,
        masked=masked,
    )


def _readout(mode, activation=None):
    return functools.partial(GeneralReadout, mode=mode, activation=activation)


def _base_cases():
    for options, given in {
        'defaults': {},
        'one layer': {'n_update_layers': 1},
        'wide': {'hidden_channels': 33, 'out_dim': 7, 'n_update_layers': 3},
        'max': {'readout': _readout('max')()},
        'summax': {'readout': _readout('summax')()},
        'activated readout': {'readout': _readout('sum', functions.tanh)()},
        'batch norm': {'use_batch_norm': True},
        'batch norm, max': {'use_batch_norm': True, 'readout': _readout('max')()},
        'atom types': {'n_atom_types': 25},
    }.items():
        given = dict({'out_dim': 3, 'dropout_ratio': 0.0}, **given)
        yield new_case('RSGCN', options, models.RSGCN, 'normalised', **given)
    for options, given in {
        'defaults': {'masked': True},
        'one layer': {'n_update_layers': 1},
        'wide': {'hidden_channels': 33, 'n_update_layers': 3},
        'few degrees': {'max_degree': 2},
        'one degree': {'max_degree': 0},
        'atom types': {'n_atom_types': 25},
    }.items():
        # Degrees by row and by column differ in some cases, and are the same in others.
        adjacency = 'counted' if options in ('one layer', 'few degrees') else 'counted bonds'
        yield new_case('NFP', options, models.NFP, adjacency, out_dim=3, **given)
    for options, given in {
        'defaults': {'masked': True},
        'node embedding': {'node_embedding': True},
        'no layer': {'n_update_layers': 0},
        'one layer': {'n_update_layers': 1},
        'wide': {'hidden_channels': 33, 'n_update_layers': 3},
        'concatenated': {'concat_hidden': True, 'masked': True},
        'tied': {'weight_tying': True},
        'tied, concatenated': {'weight_tying': True, 'concat_hidden': True},
        'activated': {'activation': ACTIVATION},
        'atom types': {'n_atom_types': 25},
    }.items():
        yield new_case('GIN', options, models.GIN, 'counted', out_dim=3, dropout_ratio=0.0, **given)
    for options, given in {
        'defaults': {'masked': True},
        'untied': {'weight_tying': False},
        'concatenated': {'concat_hidden': True, 'masked': True},
        'untied, concatenated': {'weight_tying': False, 'concat_hidden': True},
        'one update': {'n_update_layers': 1},
        'activated': {'activation': ACTIVATION},
        'wide': {'hidden_channels': 33, 'n_update_layers': 2},
        'two relations': {'n_edge_types': 2},
        'one relation': {'n_edge_types': 1},
        'atom types': {'n_atom_types': 25},
    }.items():
        yield new_case('GGNN', options, models.GGNN, 'relations', 4, out_dim=3, **given)
    for options, given in {
        'defaults': {},
        'scaled': {'scale_adj': True},
        'wide to narrow and back': {'hidden_channels': [7, 33, 5, 5, 12], 'out_dim': 3},
        'number of layers': {'hidden_channels': 6, 'n_update_layers': 3, 'scale_adj': True},
        'no convolution': {'hidden_channels': 6, 'n_update_layers': 1},
        'features': {'input_type': 'float', 'scale_adj': True},
        'one relation': {'n_edge_types': 1, 'scale_adj': True},
        'two relations': {'n_edge_types': 2},
        'atom types': {'n_atom_types': 25},
    }.items():
        kind = 'features' if 'input_type' in given else 'relations'
        yield new_case('RelGCN', options, models.RelGCN, kind, 4, **given)
    for readout in ('set2set', 'ggnn'):
        for options, given in {
            '': {},
            ', untied': {'weight_tying': False},
            ', concatenated': {'concat_hidden': True, 'n_update_layers': 2},
            ', two relations': {'n_edge_types': 2},
        }.items():
            yield new_case(
                'MPNN',
                readout + options,
                models.MPNN,
                'relations',
                4,
                out_dim=3,
                message_func='ggnn',
                readout_func=readout,
                **given,
            )
    for options, given in {
        'defaults': {},
        'within': {'softmax_mode': 'within'},
        'tied': {'weight_tying': True},
        'concatenated': {'concat_hidden': True},
        'one head': {'n_heads': 1},
        'heads concatenated': {'concat_heads': True, 'n_heads': 2},
        'heads concatenated, within': {'concat_heads': True, 'softmax_mode': 'within'},
        'slope': {'negative_slope': 0.5},
        'activated': {'activation': ACTIVATION},
        'two relations': {'n_edge_types': 2},
        'atom types': {'n_atom_types': 25},
    }.items():
        yield new_case('RelGAT', options, models.RelGAT, 'relations', 4, out_dim=3, **given)
    for options, given in {
        'defaults': {'masked': True},
        'untied': {'weight_tying': False},
        'concatenated': {'concat_hidden': True, 'masked': True},
        'untied, concatenated': {'weight_tying': False, 'concat_hidden': True},
        'one update': {'n_update_layers': 1},
        'activated': {'activation': ACTIVATION},
        'two relations': {'n_edge_types': 2},
        'atom types': {'n_atom_types': 25},
    }.items():
        yield new_case('GNNFiLM', options, models.GNNFiLM, 'relations', 5, out_dim=3, **given)


def _wrapper_cases():
    nets = {
        'GWM': (gwm_net, ('GGNN', 'GIN', 'NFP', 'RSGCN')),
        'CWLE': (cwle_net, ('GGNN', 'GIN', 'NFP', 'RSGCN', 'RelGCN', 'RelGAT')),
        'GWLE': (gwle_net, ('GGNN', 'GIN', 'NFP', 'RSGCN', 'RelGCN', 'RelGAT')),
    }
    relations = {
        'defaults': {'masked': True},
        'untied': {'weight_tying': False},
        'untied, concatenated': {'weight_tying': False, 'concat_hidden': True},
        'activated': {'activation': ACTIVATION},
        'two relations': {'n_edge_types': 2},
        'off': {'off': True},
    }
    wide = {'out_dim': 16, 'hidden_channels': 16}
    options: dict[str, dict] = {
        'GGNN': relations,
        'RelGCN': relations,
        'RelGAT': relations,
        'GIN': {name: relations[name] for name in relations if name != 'two relations'},
        'NFP': {
            'defaults': {'masked': True},
            'concatenated': {'concat_hidden': True},
            'few degrees': {'max_degree': 2},
            'off': {'off': True},
        },
        'RSGCN': {
            'defaults': wide,
            'batch norm': {'use_batch_norm': True, **wide},
            'max': {'readout': _readout('max'), **wide},
            'off': {'off': True},
        },
    }
    adjacencies = {'RSGCN': 'normalised', 'NFP': 'counted', 'GIN': 'counted'}
    for wrapper, (net, bases) in nets.items():
        column = 'super' if wrapper == 'GWM' else 'labels'
        for base in bases:
            name = '%s_%s' % (base, wrapper)
            adjacency = adjacencies.get(base, 'relations')
            n_relations = 4 if adjacency == 'relations' else 1
            for label, given in options[base].items():
                given = dict({'out_dim': 5}, **given)
                if given.pop('off', False):
                    given['with_gwm' if wrapper == 'GWM' else 'with_wle'] = False
                if (base, wrapper, label) == ('RSGCN', 'GWM', 'max'):
                    given['one_size'] = True  # else phantom atoms differ by rounding
                if base in ('RSGCN', 'GIN'):
                    given['dropout_ratio'] = 0.0
                if wrapper != 'GWM':
                    given['n_wle_types'] = N_LABELS
                kind = getattr(net, name)
                yield new_case(name, label, kind, adjacency, n_relations, column, **given)
    common = dict(hidden_channels=6, out_dim=5, n_update_layers=3, readout_layer=GGNNReadout)
    for kind, label, column, given in (
        (
            GWMGraphConvModel,
            'RelGCN, scaled',
            'super',
            dict(update_layer=RelGCNUpdate, scale_adj=True, activation=functions.tanh),
        ),
        (
            GWMGraphConvModel,
            'super node of its own width, two heads, summed',
            'super',
            dict(
                update_layer=GGNNUpdate,
                super_node_dim=9,
                sum_hidden=True,
                gwm_kwargs={'n_heads': 2, 'activation': functions.tanh},
            ),
        ),
        (
            CWLEGraphConvModel,
            'labels of their own width',
            'labels',
            dict(update_layer=GGNNUpdate, wle_dim=9, n_wle_types=N_LABELS),
        ),
    ):
        yield new_case(kind.__name__, label, kind, 'relations', 4, column, **given, **common)


def _edge_cases():
    for options, given in {
        'defaults': {},
        'node embedding': {'node_embedding': True, 'out_channels': 5},
        'features': {},
        'features, node embedding': {'node_embedding': True, 'out_channels': 5},
        'no layer, features': {'n_update_layers': 0},
        'one layer': {'n_update_layers': 1},
        'wide': {'hidden_channels': 33, 'n_update_layers': 3},
        'tied, features': {'weight_tying': True},
        'activated, features': {'activation': ACTIVATION},
        'atom types': {'n_atom_types': 25},
    }.items():
        kind = 'edges, features' if 'features' in options else 'edges'
        given = dict({'out_dim': 3, 'dropout_ratio': 0.0}, **given)
        yield new_case('GINSparse', options, GINSparse, kind, None, **given)
    for options, given in {
        'defaults': {},
        'features': {'input_type': 'float'},
        'number of layers': {'hidden_channels': 33, 'n_update_layers': 3},
        'one relation': {'n_edge_types': 1},
        'nine relations': {'n_edge_types': 9},
        'atom types': {'n_atom_types': 25},
    }.items():
        kind = 'edges, features' if options == 'features' else 'edges'
        yield new_case('RelGCNSparse', options, RelGCNSparse, kind, 4, out_dim=3, **given)


CASES = tuple(_base_cases()) + tuple(_wrapper_cases())  # molecules
EDGE_CASES = tuple(_edge_cases())  # lists of edges
ALL_CASES = CASES + EDGE_CASES

# model -> its first case
DEFAULTS = {case.model: case for case in reversed(CASES)}
# Every model that wraps no other model, and every wrapper around a different one of them.
QUICK_MODELS = (
    *(name for name in DEFAULTS if '_' not in name and 'GraphConvModel' not in name),
    *('GGNN_GWM', 'GIN_CWLE', 'NFP_GWLE'),
)

# Options that Chainer Chemistry's constructors accept, but that make its forward passes fail.
CRASHES = (
    new_case(
        'GIN',
        'out_channels other than hidden_channels',
        models.GIN,
        'counted',
        out_dim=3,
        out_channels=5,
    ),
    *(
        case._replace(
            options='concat_hidden with weight_tying, its default',
            make=functools.partial(case.make, concat_hidden=True),
        )
        for case in _wrapper_cases()
        if case.options == 'defaults'
        and case.model.split('_')[0] in ('GGNN', 'GIN', 'RelGAT', 'RelGCN')
    ),
)


def examples_of(case, seed=0):
    """Return random molecules (atoms, adjacency, and the case's column if any), or edge lists."""
    rng = numpy.random.RandomState(seed)
    if case.adjacency.startswith('edges'):
        n_channels = 6 if case.adjacency == 'edges, features' else None
        return edge_lists(case.sizes, case.n_relations, n_channels, seed=seed)
    is_float = case.adjacency == 'features'
    examples = []
    for n in case.sizes:
        atoms = rng.randint(1, 20, n).astype('i')
        if is_float:
            atoms = rng.uniform(-1, 1, (n, 6)).astype('f')
        adj = adjacency(rng, n, 'relations' if is_float else case.adjacency, case.n_relations)
        column = {
            'super': lambda: (rng.uniform(-1, 1, 7).astype('f'),),
            None: lambda: (),
            'labels': lambda n=n: (rng.randint(0, N_LABELS, (n,)).astype('i'),),
        }[case.column]()
        examples.append((atoms, adj) + column)
    return examples


# --- comparison ---


def dense_batch(examples):
    """Return a batch of molecules or of lists of edges for Chainer Chemistry's model."""
    if isinstance(examples[0], tuple):
        return dense_concat_mols(examples)
    return (SparseGraphDataset(examples).converter(examples, -1),)


def initialised(make, examples):
    """Return a model with all parameters; no bias is 0, and no norm is the identity.

    Otherwise mistakes in them would not be noticed.
    """
    numpy.random.seed(0)
    model = make()
    with chainer.no_backprop_mode():
        model(*dense_batch(examples[:1]))
    for link in model.links():
        if isinstance(link, chainer.links.GRU) and link.W_r.W.array is None:
            link.W_r._initialize_params(link.W.W.shape[1])  # unused without a state
    rng = numpy.random.RandomState(5)
    for name, parameter in sorted(model.namedparams()):
        if re.search(r'/b\d*$', name):
            parameter.array[...] = rng.uniform(-0.5, 0.5, parameter.shape)
    for name, parameter in sorted(model.namedparams()):
        if name.endswith(('/gamma', '/beta')):
            parameter.array[...] += rng.uniform(-0.5, 0.5, parameter.shape)
    model.cleargrads()
    return model


def to_double(model):
    """Return a float64 copy of a model."""
    model = copy.deepcopy(model)
    for link in model.links():
        for name in link._params:
            parameter = getattr(link, name)
            if parameter.array is not None:  # else the layer is never used
                parameter.array = parameter.array.astype('d')
        for name in link._persistent:
            value = getattr(link, name)
            if isinstance(value, numpy.ndarray) and value.dtype == numpy.float32:
                setattr(link, name, value.astype('d'))
        if isinstance(link, chainer.links.BatchNormalization):
            link._highprec_dtype = numpy.dtype('d')
    return model


def double(batch):
    """Convert float32 arrays; a sparse adjacency itself takes the dtype of the features."""
    if len(batch) == 1:  # upstream's batch of lists of edges
        data = copy.copy(batch[0])
        data.x = _double(data.x)
        return (data,)
    return tuple(map(_double, batch))


def _double(array):
    return array.astype('d') if getattr(array, 'dtype', None) == numpy.float32 else array


@contextlib.contextmanager
def dense_models_in_float64():
    """Run links of Chainer Chemistry in float64, even if they contain float32 constants."""
    where, scatter_add = functions.where, functions.scatter_add
    lstm = chainer.links.NStepLSTM.forward

    def cast_where(condition, x, y):
        dtype = numpy.promote_types(x.dtype, y.dtype)
        return where(condition, functions.cast(x, dtype), functions.cast(y, dtype))

    def cast_scatter_add(a, slices, b):
        return scatter_add(functions.cast(chainer.as_variable(a), b.dtype), slices, b)

    def cast_lstm(self, hx, cx, xs):
        return lstm(self, hx, cx, [functions.cast(x, self.ws[0][0].dtype) for x in xs])

    with (
        unittest.mock.patch.object(functions, 'where', cast_where),
        unittest.mock.patch.object(functions, 'scatter_add', cast_scatter_add),
        unittest.mock.patch.object(chainer.links.NStepLSTM, 'forward', cast_lstm),
    ):
        yield


def outcome(model, batches):
    """Return output and gradients of all parameters, summed over batches, by name, on the host."""
    model.cleargrads()
    outputs = []
    for inputs in batches:
        y = unfolded(model(*inputs), inputs[1] if len(inputs) > 1 else None)
        weight = numpy.linspace(0.5, 1.5, y.shape[-1]).astype(y.dtype)
        functions.sum(y * y * model.xp.asarray(weight)).backward()
        outputs.append(cuda.to_cpu(y.array).reshape(-1, y.shape[-1]))
    params = {name[len('/model') :]: p for name, p in model.namedparams() if p.grad is not None}
    result = {name: cuda.to_cpu(p.grad) for name, p in params.items()}
    result['output'] = numpy.concatenate(outputs)
    return result


def unfolded(y, adj):
    """Return features of the nodes of a folded batch with each row as often as it counts.

    Other results are returned unchanged.
    """
    weights = getattr(adj, 'row_weights', None)
    if weights is None or len(y) != adj.n_rows:
        return y
    copies = cuda.to_cpu(weights).astype(int)
    return y[adj.xp.asarray(numpy.repeat(numpy.arange(adj.n_rows), copies))]


def errors(actual, truth):
    """Return the relative error norm of the output and of each gradient."""
    if actual.keys() != truth.keys():
        others = ', '.join(sorted(actual.keys() ^ truth.keys()))
        raise AssertionError('gradients of other parameters: ' + others)
    norms = {name: numpy.linalg.norm(array) for name, array in truth.items()}
    whole = numpy.linalg.norm([norm for name, norm in norms.items() if name != 'output'])
    found = {}
    for name, array in truth.items():
        scale = whole if name != 'output' and norms[name] < ZERO * whole else norms[name]
        found[name] = float(numpy.linalg.norm(actual[name] - array) / (scale or 1))
    return found


def compare(case, device, with_own=True):
    """Return layout -> name -> errors of upstream's float32, our float32, and our float64."""
    examples = examples_of(case)
    dense = initialised(case.make, examples)
    if case.adjacency.startswith('edges'):
        truth = upstream(dense, [dense_batch(examples)], with_own)
        batch = CSRConverter('packed')(to_sparse(examples, case.n_relations), device)
        return {'packed': measure(dense, truth, batch, device)}
    packed = examples_of(case._replace(sizes=case.packed_sizes))
    one_size = len(set(case.packed_sizes)) == 1
    alone = [packed] if one_size else [[example] for example in packed]
    padded = [dense_concat_mols(examples)]
    converters = converters_of(case)
    folded_and_padded = [converters[layout](examples, device) for layout in LAYOUTS[1:]]
    truth = upstream(dense, list(map(dense_concat_mols, alone)), with_own)
    found = {'packed': measure(dense, truth, converters['packed'](packed, device), device)}
    masks = {'': (None, None, None)}
    if case.masked:
        masks[', masked'] = mask_of(case.sizes), folded_mask_of(case.sizes), mask_of(case.sizes)
    for suffix, (mask, *ours) in masks.items():
        truth = upstream(dense, padded, with_own, mask)
        for layout, batch, mask in zip(LAYOUTS[1:], folded_and_padded, ours):
            found[layout + suffix] = measure(dense, truth, batch, device, mask)
    return found


def converters_of(case):
    """Return layout -> converter."""
    n = int(case.column == 'labels')
    return {layout: CSRConverter(layout, n_node_columns=n) for layout in LAYOUTS}


def upstream(dense, batches, with_own=True, mask=None):
    """Return the outcome of a dense model in float64, and name -> error in float32.

    `mask`: the model's is_real_node. Without `with_own` the errors are 0.
    """
    with dense_models_in_float64():
        truth = outcome(_Masked(to_double(dense), mask), map(double, batches))
    if not with_own:
        return truth, dict.fromkeys(truth, 0.0)
    return truth, errors(outcome(_Masked(copy.deepcopy(dense), mask), batches), truth)


def measure(dense, theirs, batch, device, mask=None):
    """Return name -> errors of upstream's float32, our float32, and our float64.

    `theirs`: result of `upstream`; `batch`: the sparse model's inputs on its device; `mask`:
    is_real_node of this batch, on the host.
    """
    truth, own = theirs
    mask = None if mask is None else device.send(mask)
    ours = [
        errors(outcome(_Masked(swapped(model, device), mask), [inputs]), truth)
        for model, inputs in ((dense, batch), (to_double(dense), double(batch)))
    ]
    return {key: dict(zip(COLUMNS, (own[key], ours[0][key], ours[1][key]))) for key in truth}


def swapped(dense, device):
    """Return a swapped copy of a model on a device."""
    model = chainer_bspmm.sparsify(copy.deepcopy(dense))
    model.to_device(device)
    return model


def sparse_link(kind, dense):
    """Return a copy of a link of Chainer Chemistry with our class `kind`, and swapped readouts."""
    link = copy.deepcopy(dense)
    for part, its_kind in kind.swaps(link):
        part.__class__ = its_kind
    return link


def randomised(model):
    """Give every parameter random values, because biases start at 0, which hides mistakes."""
    rng = numpy.random.RandomState(0)
    for _, parameter in sorted(model.namedparams(include_uninit=False)):
        shape = parameter.shape
        parameter.array[...] = rng.normal(scale=1 / shape[-1] ** 0.5, size=shape)
    return model


class _Masked(chainer.Chain):
    """A model that is called with is_real_node, if there is one, and is in `/model`."""

    def __init__(self, model, mask):
        super().__init__()
        self.add_link('model', model)
        self.given = {} if mask is None else {'is_real_node': mask}
        self.to_device(model.device)

    def forward(self, *inputs):
        return self.model(*inputs, **self.given)


def check(case, device):
    """Return a line of text for each error beyond its bound, quickly if there is none."""
    return failures(compare(case, device, with_own=False)) and failures(compare(case, device))


def assert_same_in_training(monkeypatch, make, examples):
    """Compare a swapped model with the dense one in training, where both drop the same elements.

    Everything is float64. `examples` must have one size, so that both draw for the same rows.
    """
    draw_as_chainer(monkeypatch)
    dense = to_double(initialised(make, examples))
    model = swapped(dense, chainer.get_device('@numpy'))
    numpy.random.seed(0)
    with dense_models_in_float64():
        truth = outcome(_Masked(dense, None), [double(dense_concat_mols(examples))])
    numpy.random.seed(0)
    actual = outcome(_Masked(model, None), [double(CSRConverter('packed')(examples))])
    found = errors(actual, truth)
    assert max(found.values()) <= FLOAT64, found


def failures(found):
    """Return a line of text for each error of :func:`compare` that is beyond its bound."""
    lines = []
    for layout, names in found.items():
        for name, e in names.items():
            bound = max(FLOAT32, OWN_ERRORS * e['upstream'])
            if not e['ours'] <= bound:
                lines.append('%s %s: %.1e > %.1e' % (layout, name, e['ours'], bound))
            if not e['ours float64'] <= FLOAT64:
                lines.append('%s %s: %.1e in float64' % (layout, name, e['ours float64']))
    return lines


def crash(case):
    """Return the type of the error that Chainer Chemistry's model raises, or None."""
    examples = examples_of(case)
    try:
        initialised(case.make, examples)
    except Exception as error:
        return type(error).__name__
    return None


def padded_example(case, example, n):
    """Return an example of a case with phantom atoms up to n."""
    atoms, adj, *column = example
    room = 0, max(n - len(atoms), 0)
    if case.column == 'labels':
        column = [numpy.pad(column[0], room)]
    still = [(0, 0)]
    adj = numpy.pad(adj, still * (adj.ndim - 2) + [room] * 2)
    return (numpy.pad(atoms, [room] + still * (atoms.ndim - 1)), adj, *column)
