"""Networks in JAX of the same shape as Chainer Chemistry's, their batches, and jitted steps.

They follow the advice of JAX's documentation: batches padded to one size, which are on the device
before the first step; segment sums over sorted targets; a state whose buffers are donated; many
steps in one `lax.scan`. Molecules and their order, head, loss, reported metric, dropout and Adam
are the same as in our steps. But these steps do less: they do not gather a batch.
"""

import itertools
import os

import concurrent.futures


# JAX must not take all memory, because it shares the GPU with CuPy in one process.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')

import jax  # NOQA: E402
from jax import numpy as jnp  # NOQA: E402
import numpy  # NOQA: E402
import optax  # NOQA: E402

from chainer_bspmm.ops.scale_adj import scale_adj  # NOQA: E402
from chainer_bspmm.dataset import CSRConverter  # NOQA: E402
from chainer_bspmm.training import sizes  # NOQA: E402

N_EDGE_TYPES = 4
DROPOUT = 0.5
# By default JAX multiplies in TF32 on a GPU.
PRECISIONS = {'FP32': 'highest', 'TF32': None}
# Steps are compiled in several threads, because XLA takes seconds for each.
THREADS = concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def total(values, segments, n_segments):
    """Return the sums over the rows of each segment; `segments` ascend."""
    return jax.ops.segment_sum(values, segments, n_segments, indices_are_sorted=True)


def dense(layer, x):
    """Return x W + b."""
    return x @ layer['W'] + layer['b'] if 'b' in layer else x @ layer['W']


def readout(layers, h, batch, activation):
    """Return the sums of sigmoid(W_i h) * activation(W_j h) over the nodes of each molecule."""
    h = jax.nn.sigmoid(dense(layers['gate'], h)) * activation(dense(layers['value'], h))
    return molecules(h, batch)


def molecules(h, batch):
    """Return the sums over each molecule's nodes; the sum over spare nodes is dropped."""
    n_graphs = len(batch['labels'])
    return total(h, batch['graph'], n_graphs + 1)[:n_graphs]


def gcn(parameters, batch, drop):
    """RSGCN: convolutions without bias by the matrix's values, dropout, rectifier, sum."""
    h = parameters['embed'][batch['atoms']]
    for i, layer in enumerate(parameters['layers']):
        messages = batch['values'][:, None] * h[batch['source']]
        h = drop(i, total(messages, batch['target'], len(h)) @ layer['W'])
        if i < len(parameters['layers']) - 1:
            h = jax.nn.relu(h)
    return molecules(h, batch)


def gin(parameters, batch, drop):
    h = h0 = parameters['embed'][batch['atoms']]
    for i, (first, second) in enumerate(parameters['layers']):
        h = h + total(h[batch['source']], batch['target'], len(h))
        h = drop(i, jax.nn.relu(dense(second, jax.nn.relu(dense(first, h)))))
    return readout(parameters['readout'], jnp.concatenate((h, h0), 1), batch, lambda x: x)


def rgcn(parameters, batch, drop):
    """RelGCN, which has no dropout. Arrays of the smaller of a layer's two widths are gathered."""
    h = parameters['embed'][batch['atoms']]
    n = len(h)
    values = batch['values'][:, None]
    for own, edge in parameters['layers']:
        W, b = edge['W'], edge['b']  # (relations, in, out), (relations, out)
        if W.shape[1] < W.shape[2]:
            of_both = batch['target'] * N_EDGE_TYPES + batch['relation']  # ascend, too
            ones = jnp.ones_like(h, shape=(n, 1))
            sent = values * jnp.hstack((h, ones))[batch['source']]
            sums = total(sent, of_both, n * N_EDGE_TYPES).reshape(n, N_EDGE_TYPES, -1)
            messages = jnp.einsum('nrc,rck->nk', sums, jnp.concatenate((W, b[:, None]), 1))
        else:
            sent = jnp.einsum('nc,rck->nrk', h, W) + b
            sent = values * sent[batch['source'], batch['relation']]
            messages = total(sent, batch['target'], n)
        h = jnp.tanh(dense(own, h) + messages)
    return readout(parameters['readout'], h, batch, jnp.tanh)


NETWORKS = {'rsgcn': gcn, 'gin': gin, 'relgcn': rgcn}


def parameters_of(method, values):
    """Return JAX's parameters in the layout of these networks.

    `values`: path -> array, for Chainer Chemistry's parameters or their changes in a step. GIN's
    ``first_mlp`` is left out, because it is never used.
    """
    graph = {
        path.removeprefix('/predictor/graph_conv/'): value
        for path, value in values.items()
        if '/graph_conv/' in path
    }

    def linear(path, of):
        found = {'W': of[path + '/W'].T}
        if path + '/b' in of:
            found['b'] = of[path + '/b']
        return found

    def layers(prefix):
        return range(1 + max(int(path.split('/')[1]) for path in graph if path.startswith(prefix)))

    found = {'embed': graph['embed/W']}
    if method == 'rsgcn':
        found['layers'] = [linear('gconvs/%d/graph_linear' % i, graph) for i in layers('gconvs/')]
    elif method == 'gin':
        found['layers'] = [
            [linear('update_layers/%d/graph_mlp/layers/%d' % (i, j), graph) for j in range(2)]
            for i in layers('update_layers/')
        ]
    else:
        found['layers'] = []
        for i in layers('rgcn_convs/'):
            own, edge = (
                linear('rgcn_convs/%d/graph_linear_%s' % (i, name), graph)
                for name in ('self', 'edge')
            )
            # In Chainer Chemistry the relation is the minor index of rows.
            W, b = (array.reshape(*array.shape[:-1], -1, N_EDGE_TYPES) for array in edge.values())
            found['layers'].append([own, {'W': W.transpose(2, 0, 1), 'b': b.T}])
    if method != 'rsgcn':
        prefix = 'readout_layers/0' if method == 'gin' else 'rgcn_readout'
        found['readout'] = {
            'gate': linear(prefix + '/i_layer', graph),
            'value': linear(prefix + '/j_layer', graph),
        }
    found['head'] = [linear('/predictor/mlp/' + name, values) for name in ('layers/0', 'l_out')]
    return jax.tree.map(lambda value: numpy.array(value, order='C'), found)


def host_batches(iterator, n_batches):
    """Return the next batches of an iterator over a SparseDataset, each name -> array on the host.

    All are padded to one size that holds each of them. Spare nodes belong to one more molecule, and
    spare edges connect spare nodes.
    """
    convert = CSRConverter('packed')
    batches = [convert(iterator.next()) for _ in range(n_batches)]
    n_rows = sizes.round_up(max(len(atoms) for atoms, _, _ in batches) + 1)
    n_edges = sizes.round_up(max(adj.nnz for _, adj, _ in batches))
    return [_padded(*batch, n_rows=n_rows, n_edges=n_edges) for batch in batches]


def _padded(atoms, adj, labels, n_rows, n_edges):
    n = len(atoms)
    nnz = adj.nnz
    rows = adj.entry_rows()
    source, relation = numpy.divmod(adj.indices, adj.n_relations)
    order = numpy.lexsort((relation, rows))
    # Targets of spare edges ascend, too, and are spread over rows, because sums into a single row
    # would wait for each other.
    spare = n + numpy.arange(n_edges - nnz) * (n_rows - n) // max(n_edges - nnz, 1)

    def edges(values, others):
        return numpy.concatenate((values[order], others)).astype('i')

    arrays = {
        'atoms': numpy.pad(atoms, (0, n_rows - n)).astype('i'),
        'graph': numpy.repeat(
            numpy.arange(adj.n_graphs + 1), [*numpy.diff(adj.row_offsets), n_rows - n]
        ).astype('i'),
        'source': edges(source, spare),
        'target': edges(rows, spare),
        'labels': labels,
    }
    if adj.n_relations > 1:
        adj = scale_adj(adj, 'f')  # in our steps RelGCN does it every time
        arrays['relation'] = edges(relation, numpy.zeros_like(spare))
    if adj.data is not None:
        arrays['values'] = numpy.pad(adj.data[order], (0, n_edges - nnz)).astype('f')
    return arrays


def loss_and_metric(y, labels):
    """Return the loss and the metric of Chainer's Classifier or Regressor for predictions."""
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return jnp.mean((y - labels) ** 2), jnp.mean(abs(y - labels))
    known = labels >= 0
    n_known = jnp.maximum(known.sum(), 1)
    losses = optax.sigmoid_binary_cross_entropy(y, labels)
    is_right = (y >= 0) == labels
    return jnp.where(known, losses, 0).sum() / n_known, (is_right & known).sum() / n_known


def step_of(method, adam, precision, dropout):
    """Return a function of (state, batch) that returns the next state, and loss and metric.

    `precision`: the precision of products, as in ``jax.default_matmul_precision``.
    """

    def objective(parameters, batch, key):
        def drop(i, h):
            if not dropout:
                return h
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - dropout, h.shape)
            return jnp.where(keep, h / (1 - dropout), 0)

        h = NETWORKS[method](parameters, batch, drop)
        hidden, last = parameters['head']
        return loss_and_metric(dense(last, jax.nn.relu(dense(hidden, h))), batch['labels'])

    def step(state, batch):
        parameters, moments, key = state
        key, now = jax.random.split(key)
        with jax.default_matmul_precision(precision):
            values, gradients = jax.value_and_grad(objective, has_aux=True)(parameters, batch, now)
        updates, moments = adam.update(gradients, moments)
        return (optax.apply_updates(parameters, updates), moments, key), values

    return step


def jax_device(device):
    """Return JAX's device for a device of Chainer."""
    if device.xp is numpy:
        return jax.devices('cpu')[0]
    return jax.devices('gpu')[device.device.id]


class Jitted:
    """Train by a jitted step for each batch, or a scan of many; the constructor compiles it.

    `batches` are on the device. They are a list, or a dict of arrays that hold all batches, which
    are then scanned. `parameters` are the parameters after the last step. A call makes `multiple`
    steps.
    """

    def __init__(self, step, adam, parameters, batches):
        is_scan = isinstance(batches, dict)
        one = batches if is_scan else batches[0]
        self._batches = itertools.cycle([batches] if is_scan else batches)
        (device,) = one['atoms'].devices()
        state = jax.device_put(parameters, device)
        self._state = jax.device_put((state, adam.init(state), jax.random.key(0)), device)
        self.multiple = len(one['atoms']) if is_scan else 1
        if is_scan:
            self._call = jax.jit(
                lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0
            )
        else:
            self._call = jax.jit(step, donate_argnums=0)
        self.run(self.multiple)
        self.wait()

    @property
    def parameters(self):
        return self._state[0]

    def run(self, n_steps):
        for _ in range(n_steps // self.multiple):
            self._state, self.values = self._call(self._state, next(self._batches))

    def wait(self):
        jax.block_until_ready((self._state, self.values))


def compiled(method, parameters, batches, device, dropout=DROPOUT, **adam):
    """Return (driver, precision) -> future of a `Jitted` that has made its first call.

    `driver`: ``'jit'``, or ``'scan'``, which runs over all batches. `precision`: a key of
    `PRECISIONS`.
    """
    adam = optax.adam(**{'learning_rate': 1e-3, **adam})
    place = jax_device(device)
    stacked = {name: numpy.stack([batch[name] for batch in batches]) for name in batches[0]}
    resident = {'jit': jax.device_put(batches, place), 'scan': jax.device_put(stacked, place)}
    return {
        (driver, name): THREADS.submit(
            Jitted, step_of(method, adam, precision, dropout), adam, parameters, resident[driver]
        )
        for driver in resident
        for name, precision in PRECISIONS.items()
    }
