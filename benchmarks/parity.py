"""How far are our models from Chainer Chemistry's, for every model and every option it can run?

Outputs, and the gradient of every parameter, of the sparse twin against the dense model: packed
batches against each molecule alone, padded ones against the dense batch. The truth is the dense
model in float64, and the measure its own error in float32. ``python -m benchmarks.parity`` writes
``benchmarks/results/cpu/parity.json``; with ``--gpu`` the twins run on a GPU, and the file is
``benchmarks/results/<gpu>/parity.json``; with ``--page`` ``docs/parity.md`` is made of these files.
"""

import argparse
import collections
import contextlib
import copy
import functools
import json
import pathlib
import re
import unittest.mock

import chainer_bspmm
import chainer
from chainer import functions
from chainer.backends import cuda
from chainer_chemistry import models
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.links import GeneralReadout
from chainer_chemistry.links.readout.ggnn_readout import GGNNReadout
from chainer_chemistry.links.update.ggnn_update import GGNNUpdate
from chainer_chemistry.links.update.relgcn_update import RelGCNUpdate
from chainer_chemistry.models.cwle import cwle_net
from chainer_chemistry.models.cwle.cwle_graph_conv_model import CWLEGraphConvModel
from chainer_chemistry.models.gwle import gwle_net
from chainer_chemistry.models.gwm import gwm_net
from chainer_chemistry.models.gwm.gwm_graph_conv_model import GWMGraphConvModel
import numpy

from benchmarks.harness import conditions
from chainer_bspmm import CSRConverter

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
PAGE = ROOT / 'docs' / 'parity.md'

SIZES = (9, 1, 17, 4, 12, 2, 30, 8)
EQUAL_SIZES = (11,) * 6  # no phantom atoms: packed and dense batches hold the same rows
N_LABELS = 40
FLOAT32, OWN_ERRORS, FLOAT64 = 1e-5, 3, 1e-10

# Of readouts, sums included. One that saturates would leave little of the gradient but rounding.
ACTIVATION = functions.leaky_relu

COLUMNS = ('upstream', 'ours', 'ours float64')  # of errors

# A gradient that is 0 but for rounding (the bias of what a softmax is taken of) is compared with
# the gradient of all parameters together. "Is 0": below this share of it, in float64.
ZERO = 1e-9


# --- what is compared ---

# model, options: names; make: () -> Chainer Chemistry's model; adjacency: kind of matrices;
# column: what comes after them, if anything; masked: padded batches with is_real_node as well.
Case = collections.namedtuple(
    'Case', 'model options make adjacency n_relations column sizes masked'
)


def _case(
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
    n_relations = given.get('n_edge_types', n_relations)
    sizes = EQUAL_SIZES if given.get('use_batch_norm') or one_size else SIZES
    return Case(
        model,
        options,
        functools.partial(kind, **given),
        adjacency,
        n_relations,
        column,
        sizes,
        masked,
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
        yield _case('RSGCN', options, models.RSGCN, 'normalised', **given)
    for options, given in {
        'defaults': {'masked': True},
        'one layer': {'n_update_layers': 1},
        'wide': {'hidden_channels': 33, 'n_update_layers': 3},
        'few degrees': {'max_degree': 2},
        'one degree': {'max_degree': 0},
        'atom types': {'n_atom_types': 25},
    }.items():
        yield _case('NFP', options, models.NFP, 'counted', out_dim=3, **given)
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
        yield _case('GIN', options, models.GIN, 'counted', out_dim=3, dropout_ratio=0.0, **given)
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
        yield _case('GGNN', options, models.GGNN, 'relations', 4, out_dim=3, **given)
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
        yield _case('RelGCN', options, models.RelGCN, kind, 4, **given)
    for readout in ('set2set', 'ggnn'):
        for options, given in {
            '': {},
            ', untied': {'weight_tying': False},
            ', concatenated': {'concat_hidden': True, 'n_update_layers': 2},
            ', two relations': {'n_edge_types': 2},
        }.items():
            yield _case(
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
        yield _case('RelGAT', options, models.RelGAT, 'relations', 4, out_dim=3, **given)
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
        yield _case('GNNFiLM', options, models.GNNFiLM, 'relations', 5, out_dim=3, **given)


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
    options = {
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
            'defaults': {'out_dim': 16, 'hidden_channels': 16},
            'batch norm': {'use_batch_norm': True, 'out_dim': 16, 'hidden_channels': 16},
            'max': {'readout': _readout('max'), 'out_dim': 16, 'hidden_channels': 16},
            'off': {'off': True},
        },
    }
    for wrapper, (net, bases) in nets.items():
        column = 'super' if wrapper == 'GWM' else 'labels'
        for base in bases:
            name = '%s_%s' % (base, wrapper)
            adjacency = {'RSGCN': 'normalised', 'NFP': 'counted', 'GIN': 'counted'}.get(
                base, 'relations'
            )
            for label, given in options[base].items():
                given = dict({'out_dim': 5}, **given)
                if given.pop('off', False):
                    given['with_gwm' if wrapper == 'GWM' else 'with_wle'] = False
                if (base, wrapper, label) == ('RSGCN', 'GWM', 'max'):
                    given['one_size'] = True  # phantom atoms are alike but for rounding
                if base in ('RSGCN', 'GIN'):
                    given['dropout_ratio'] = 0.0
                if wrapper != 'GWM':
                    given['n_wle_types'] = N_LABELS
                yield _case(
                    name,
                    label,
                    getattr(net, name),
                    adjacency,
                    4 if adjacency == 'relations' else 1,
                    column,
                    **given,
                )
    common = dict(hidden_channels=6, out_dim=5, n_update_layers=3, readout_layer=GGNNReadout)
    yield _case(
        'GWMGraphConvModel',
        'RelGCN, scaled',
        GWMGraphConvModel,
        'relations',
        4,
        'super',
        update_layer=RelGCNUpdate,
        scale_adj=True,
        activation=functions.tanh,
        **common,
    )
    yield _case(
        'GWMGraphConvModel',
        'super node of its own width, two heads, summed',
        GWMGraphConvModel,
        'relations',
        4,
        'super',
        update_layer=GGNNUpdate,
        super_node_dim=9,
        sum_hidden=True,
        gwm_kwargs={'n_heads': 2, 'activation': functions.tanh},
        **common,
    )
    yield _case(
        'CWLEGraphConvModel',
        'labels of their own width',
        CWLEGraphConvModel,
        'relations',
        4,
        'labels',
        update_layer=GGNNUpdate,
        wle_dim=9,
        n_wle_types=N_LABELS,
        **common,
    )


CASES = tuple(_base_cases()) + tuple(_wrapper_cases())

# Options that Chainer Chemistry's constructors take and its forward passes fail with.
CRASHES = (
    _case('NFP', 'concat_hidden', models.NFP, 'counted', out_dim=3, concat_hidden=True),
    _case(
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
    """Return random molecules: atoms, adjacency, and what else the case takes.

    No two atoms are equivalent, so that a maximum has one winner; relations are not symmetric, so
    that a swap of sender and receiver shows; some atoms have no bond.
    """
    rng = numpy.random.RandomState(seed)
    examples = []
    for n in case.sizes:
        atoms = rng.randint(1, 20, n).astype('i')
        if case.adjacency == 'features':
            atoms = rng.uniform(-1, 1, (n, 6)).astype('f')
        adj = _adjacency(case, rng, n).astype('f')
        column = {
            'super': lambda: (rng.uniform(-1, 1, 7).astype('f'),),
            None: lambda: (),
            'labels': lambda n=n: (rng.randint(0, N_LABELS, n).astype('i'),),
        }[case.column]()
        examples.append((atoms, adj) + column)
    return examples


def _adjacency(case, rng, n):
    if case.adjacency in ('relations', 'features'):
        kind = rng.randint(0, case.n_relations, (n, n))
        bonds = (rng.uniform(size=(n, n)) < 2.5 / max(n, 3)) * rng.uniform(0.5, 1.5, (n, n))
        return numpy.stack([bonds * (kind == r) for r in range(case.n_relations)])
    chain = numpy.eye(n) + numpy.diag(numpy.ones(n - 1), 1)
    adj = numpy.minimum(chain + chain.T + (rng.uniform(size=(n, n)) < 0.1), 1)
    if case.adjacency == 'counted':
        if n > 3:  # degrees of 0 and beyond 7, an entry of 2
            adj[:, 1], adj[:, 3], adj[0, 2] = 0, 1, 2
        return adj
    adj = numpy.maximum(adj, adj.T) * rng.uniform(0.5, 1.5, (n, n))
    return (adj + adj.T) / numpy.sqrt(adj.sum(0) * adj.sum(1)[:, None])


# --- how it is compared ---


def initialised(make, examples):
    """Return a model whose lazy parameters have their shapes, and whose biases are not 0."""
    numpy.random.seed(0)
    model = make()
    with chainer.no_backprop_mode():
        model(*dense_concat_mols(examples[:1]))
    for link in model.links():
        if isinstance(link, chainer.links.GRU) and link.W_r.W.array is None:
            link.W_r.W.initialize(link.W.W.shape)  # takes no part where there never is a state
    rng = numpy.random.RandomState(5)
    for name, parameter in sorted(model.namedparams()):
        if re.search(r'/b\d*$', name):
            parameter.array[...] = rng.uniform(-0.5, 0.5, parameter.shape)
    model.cleargrads()
    return model


def to_double(model):
    """Return a float64 copy of a model."""
    model = copy.deepcopy(model)
    for link in model.links():
        for name in link._params:
            parameter = getattr(link, name)
            if parameter.array is not None:  # of a layer that is never used
                parameter.array = parameter.array.astype('d')
        for name in link._persistent:
            value = getattr(link, name)
            if isinstance(value, numpy.ndarray) and value.dtype == numpy.float32:
                setattr(link, name, value.astype('d'))
        if isinstance(link, chainer.links.BatchNormalization):
            link._highprec_dtype = numpy.dtype('d')
    return model


def double(batch):
    """Convert what holds float32; an adjacency takes the dtype of the features by itself."""
    return tuple(
        array.astype('d') if getattr(array, 'dtype', None) == numpy.float32 else array
        for array in batch
    )


@contextlib.contextmanager
def dense_models_in_float64():
    """Let Chainer Chemistry's links that mix float32 constants into any dtype run in float64."""
    where, lstm = functions.where, chainer.links.NStepLSTM.forward

    def cast_where(condition, x, y):
        dtype = numpy.promote_types(x.dtype, y.dtype)
        return where(condition, functions.cast(x, dtype), functions.cast(y, dtype))

    def cast_lstm(self, hx, cx, xs):
        return lstm(self, hx, cx, [functions.cast(x, self.ws[0][0].dtype) for x in xs])

    with (
        unittest.mock.patch.object(functions, 'where', cast_where),
        unittest.mock.patch.object(chainer.links.NStepLSTM, 'forward', cast_lstm),
    ):
        yield


def outcome(model, batches):
    """Return output and gradients of all parameters, summed over batches, by name on the host."""
    model = copy.deepcopy(model)
    model.cleargrads()
    outputs = []
    for inputs in batches:
        y = model(*inputs)
        weight = numpy.linspace(0.5, 1.5, y.shape[-1]).astype(y.dtype)
        functions.sum(y * y * model.xp.asarray(weight)).backward()
        outputs.append(cuda.to_cpu(y.array).reshape(-1, y.shape[-1]))
    result = {
        name[len('/model') :]: cuda.to_cpu(p.grad)
        for name, p in model.namedparams()
        if p.grad is not None
    }
    result['output'] = numpy.concatenate(outputs)
    return result


def errors(actual, truth):
    """Return the relative error norm of the output and of each gradient."""
    if actual.keys() != truth.keys():
        raise AssertionError(
            'gradients of other parameters: %s' % ', '.join(sorted(actual.keys() ^ truth.keys()))
        )
    norms = {name: numpy.linalg.norm(array) for name, array in truth.items()}
    whole = numpy.linalg.norm([norm for name, norm in norms.items() if name != 'output'])
    found = {}
    for name, array in truth.items():
        scale = whole if name != 'output' and norms[name] < ZERO * whole else norms[name]
        found[name] = (
            float(numpy.linalg.norm(actual[name] - array) / scale)
            if scale
            else float(numpy.linalg.norm(actual[name]))
        )
    return found


def compare(case, device):
    """Return, by layout and by name, the errors of upstream's float32, ours, and our float64.

    Args:
        case (Case): what to compare.
        device (chainer.backend.Device): where the sparse twin runs.
    """
    examples = examples_of(case)
    dense = initialised(case.make, examples)
    padded = dense_concat_mols(examples)
    alone = [padded] if len(set(case.sizes)) == 1 else [dense_concat_mols([e]) for e in examples]
    layouts = {'packed': ('packed', alone, {}), 'padded': ('padded', [padded], {})}
    if case.masked:
        mask = (numpy.arange(max(case.sizes)) < numpy.array(case.sizes)[:, None]).astype('f')
        layouts['padded, masked'] = 'padded', [padded], {'is_real_node': mask}
    result = {}
    for name, (layout, batches, given) in layouts.items():

        def bound(model, send=lambda array: array, given=given):
            return _Given(model, {key: send(array) for key, array in given.items()})

        with dense_models_in_float64():
            truth = outcome(bound(to_double(dense)), map(double, batches))
        upstream = errors(outcome(bound(dense), batches), truth)
        batch = CSRConverter(layout, 1 if case.column == 'labels' else 0)(examples, device)
        ours = []
        for model, inputs in ((copy.deepcopy(dense), batch), (to_double(dense), double(batch))):
            model = chainer_bspmm.sparsify(model)
            model.to_device(device)
            ours.append(errors(outcome(bound(model, device.send), [inputs]), truth))
        result[name] = {
            key: dict(zip(COLUMNS, (upstream[key], ours[0][key], ours[1][key]))) for key in truth
        }
    return result


class _Given(chainer.Chain):
    """A model with some arguments set; parameter paths and array module are the model's."""

    def __init__(self, model, given):
        super().__init__()
        self.add_link('model', model)
        self.given = given
        self.to_device(model.device)

    def forward(self, *inputs):
        return self.model(*inputs, **self.given)


def failures(found):
    """Return what is beyond its bound in the result of :func:`compare`, as lines of text."""
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
    """Return how Chainer Chemistry's own model fails, or None."""
    examples = examples_of(case)
    try:
        initialised(case.make, examples)
    except Exception as error:
        return type(error).__name__
    return None


# --- what is written ---

PAGE_INTRO = """\
# Parity with Chainer Chemistry

Written by `python -m benchmarks.parity`. Every model of Chainer Chemistry that `sparsify` swaps,
with every option that Chainer Chemistry itself can run, against its sparse twin: the output, and
the gradient of every parameter, each of which is in
[benchmarks/results/cpu/parity.json](../benchmarks/results/cpu/parity.json).

- **packed**: one batch without padding, against the dense model run on each molecule alone. With
  batch normalisation all molecules have one size, where both see the same rows; so they have for
  RSGCN_GWM's maximum, which phantom atoms would share, alike but for rounding.
- **padded**: `CSRConverter(layout='padded')`, against the dense model on the padded batch, phantom
  atoms included. **masked**: the same with `is_real_node`.
- A number is the relative error norm in float32 against the dense model in float64; behind it, in
  brackets, the error of the dense model in float32. For gradients it is that of the parameter which
  comes closest to its bound. A gradient that is 0 but for rounding is measured against all
  gradients together.
- The bound is max({float32:g}, {own} times the number in brackets). In float64 (last column, the
  largest of the row) it is {float64:g}.
- Rows beyond a bound: {beyond}. On {machine}.
{others}- Molecules are random, of {sizes} atoms; relations are not symmetric, no two
  atoms are equivalent. Dropout is off: its random numbers depend on the shape of the batch.
"""
PAGE_CRASHES = """
What Chainer Chemistry takes in the constructor and fails with when it is called:

| model | options | error |
|---|---|---|"""


def run(device, commit):
    result = {
        'method': 'Relative error norms against the dense model in float64. Bounds: float32 '
        'max(%g, %g x the error of the dense model in float32), float64 %g'
        % (FLOAT32, OWN_ERRORS, FLOAT64),
        'conditions': conditions(commit, 'generated', len(SIZES)),
        'columns': COLUMNS,
        'cases': [],
        'upstream fails': [],
    }
    if device.xp is not numpy:
        result['conditions']['gpu'] = gpu_name()
        result['conditions']['cupy'] = cuda.cupy.__version__
    for case in CASES:
        found = compare(case, device)
        beyond = failures(found)
        print('%s, %s: %s' % (case.model, case.options, '; '.join(beyond) or 'ok'), flush=True)
        result['cases'].append(
            {
                'model': case.model,
                'options': case.options,
                'failures': beyond,
                'layouts': {layout: _short(names) for layout, names in found.items()},
            }
        )
    for case in CRASHES:
        result['upstream fails'].append(
            {'model': case.model, 'options': case.options, 'error': crash(case)}
        )
    return result


def _short(names):
    """Return lists of `COLUMNS`, of two digits: the file holds thousands of them."""
    return {name: [float('%.1e' % e[column]) for column in COLUMNS] for name, e in names.items()}


def gpu_name():
    properties = cuda.cupy.cuda.runtime.getDeviceProperties(cuda.cupy.cuda.Device().id)
    return properties['name'].decode()


def _cells(names):
    """Return output and worst gradient as ``ours (upstream's own)``."""

    def cell(e):
        return '%.0e (%.0e)' % (e[1], e[0])

    def excess(name):
        return names[name][1] / max(FLOAT32, OWN_ERRORS * names[name][0])

    worst = max((name for name in names if name != 'output'), key=excess)
    return [cell(names['output']), cell(names[worst])]


def table(result):
    """Return the results as lines of Markdown."""
    lines = [
        '| model | options | packed: output | gradients | padded: output | gradients | '
        'masked: output | gradients | float64 |',
        '|---' * 9 + '|',
    ]
    model = None
    for case in result['cases']:
        cells = []
        for layout in ('packed', 'padded', 'padded, masked'):
            names = case['layouts'].get(layout)
            cells += _cells(names) if names else ['', '']
        worst = max(e[2] for names in case['layouts'].values() for e in names.values())
        lines.append(
            '| %s |'
            % ' | '.join(
                [
                    case['model'] if case['model'] != model else '',
                    case['options'],
                    *cells,
                    '%.0e' % worst,
                ]
            ).replace('|  |', '| |')
        )
        model = case['model']
    return [re.sub(r' {2,}', ' ', line) for line in lines]


def page(folder):
    """Return docs/parity.md, of the files in ``folder/*/parity.json``."""
    stored = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(folder.glob('*/parity.json'))
    }
    result = stored.pop('cpu')
    intro = PAGE_INTRO.format(
        sizes=', '.join(map(str, sorted(SIZES))),
        float32=FLOAT32,
        float64=FLOAT64,
        own=OWN_ERRORS,
        beyond=_beyond(result),
        machine=_machine(result),
        others=''.join(
            '- On %s: rows beyond a bound: %s.\n' % (_machine(other), _beyond(other))
            for other in stored.values()
        ),
    )
    crashes = [
        '| %s | %s | `%s` |' % (c['model'], c['options'], c['error'])
        for c in result['upstream fails']
    ]
    return '\n'.join([intro, *table(result), PAGE_CRASHES, *crashes, ''])


def _beyond(result):
    n_failed = sum(bool(case['failures']) for case in result['cases'])
    return '%d of %d' % (n_failed, len(result['cases']))


def _machine(result):
    of = result['conditions']
    return '%s, Python %s, NumPy %s%s, commit %s, %s' % (
        of.get('gpu', of['cpu']),
        of['python'],
        of['numpy'],
        ', CuPy ' + of['cupy'] if 'cupy' in of else '',
        of['commit'],
        of['date'],
    )


def dumps(result):
    """Return the file: indented JSON, but a list of numbers or names on one line."""
    return (
        re.sub(
            r'\[[^][{}]*\]',
            lambda part: ' '.join(part.group().split()),
            json.dumps(result, indent=1),
        )
        + '\n'
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--gpu', action='store_true', help='run the sparse models on a GPU')
    parser.add_argument(
        '--page',
        action='store_true',
        help='only write docs/parity.md, from the files that are there',
    )
    parser.add_argument('--commit', help='what to note as the commit; asks git otherwise')
    parser.add_argument('--out', type=pathlib.Path, default=RESULTS, help='folder of results')
    args = parser.parse_args(argv)
    if args.page:
        PAGE.write_text(page(args.out))
        return 0
    device = chainer.get_device('@cupy:0' if args.gpu else '@numpy')
    device.use()
    result = run(device, args.commit)
    folder = args.out / (re.sub(r'\W+', '-', gpu_name().lower()) if args.gpu else 'cpu')
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / 'parity.json'
    path.write_text(dumps(result))
    print('wrote', path)
    return 1 if any(case['failures'] for case in result['cases']) else 0


if __name__ == '__main__':
    raise SystemExit(main())
