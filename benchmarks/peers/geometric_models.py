"""PyTorch Geometric's networks, of the same shape as Chainer Chemistry's, and their batches."""

import itertools
import types

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, RGCNConv, global_add_pool

from chainer.backends import cuda
from chainer_chemistry.config import MAX_ATOMIC_NUM

from chainer_bspmm.dataset import CSRConverter
from chainer_bspmm.training import sizes
from chainer_bspmm.training.staging import Staging

N_EDGE_TYPES = 4


class GatedReadout(nn.Module):
    """Sum over the nodes of sigmoid(W_i x) * activation(W_j x)."""

    def __init__(self, n_in, n_out, bias, activation):
        super().__init__()
        self.gate = nn.Linear(n_in, n_out, bias=bias)
        self.value = nn.Linear(n_in, n_out, bias=bias)
        self.activation = activation

    def forward(self, x, batch, n_graphs):
        x = torch.sigmoid(self.gate(x)) * self.activation(self.value(x))
        return global_add_pool(x, batch, n_graphs)


class GCN(nn.Module):
    """RSGCN: convolutions without bias by the matrix's values, dropout, rectifier, sum."""

    def __init__(self, n_unit, n_layers):
        super().__init__()
        self.embed = nn.Embedding(MAX_ATOMIC_NUM, n_unit)
        self.layers = nn.ModuleList(
            GCNConv(n_unit, n_unit, normalize=False, add_self_loops=False, bias=False)
            for _ in range(n_layers)
        )

    def forward(self, data):
        h = self.embed(data.x)
        for i, layer in enumerate(self.layers):
            h = F.dropout(layer(h, data.edge_index, data.edge_attr), 0.5, self.training)
            if i < len(self.layers) - 1:
                h = F.relu(h)
        return global_add_pool(h, data.batch, data.num_graphs)


class GIN(nn.Module):
    def __init__(self, n_unit, n_layers):
        super().__init__()
        self.embed = nn.Embedding(MAX_ATOMIC_NUM, n_unit)
        self.layers = nn.ModuleList(
            GINConv(
                nn.Sequential(
                    nn.Linear(n_unit, n_unit), nn.ReLU(), nn.Linear(n_unit, n_unit), nn.ReLU()
                )
            )
            for _ in range(n_layers)
        )
        self.readout = GatedReadout(2 * n_unit, n_unit, True, nn.Identity())

    def forward(self, data):
        h = h0 = self.embed(data.x)
        for layer in self.layers:
            h = F.dropout(layer(h, data.edge_index), 0.5, self.training)
        return self.readout(torch.cat((h, h0), 1), data.batch, data.num_graphs)


class RelationConv(RGCNConv):
    """RGCNConv that also takes a list of edges for each relation, and then reads no device values.

    RGCNConv itself sorts the edges into such lists in every call, and waits for their lengths,
    which a CUDA graph cannot do. The products are the same.
    """

    def forward(self, x, edge_index, edge_type=None):
        if not isinstance(edge_index, list):
            return super().forward(x, edge_index, edge_type)
        out = x @ self.root + self.bias
        for edges, weight in zip(edge_index, self.weight):
            out = out + self.propagate(edges, x=x, edge_type_ptr=None, size=None) @ weight
        return out


class RGCN(nn.Module):
    """RelGCN with the default widths of Chainer Chemistry; neighbours are added without scaling."""

    def __init__(self, n_unit, n_layers):
        super().__init__()
        widths = (16, 128, 64)
        self.embed = nn.Embedding(MAX_ATOMIC_NUM, widths[0])
        self.layers = nn.ModuleList(
            RelationConv(*pair, N_EDGE_TYPES, aggr='add') for pair in zip(widths, widths[1:])
        )
        self.readout = GatedReadout(widths[-1], n_unit, False, torch.tanh)

    def forward(self, data):
        h = self.embed(data.x)
        for layer in self.layers:
            h = torch.tanh(layer(h, data.edge_index, data.edge_type))
        return self.readout(h, data.batch, data.num_graphs)


PEERS = {'rsgcn': GCN, 'gin': GIN, 'relgcn': RGCN}


def examples_of(sparse):
    """Convert the molecules of a SparseDataset to PyTorch Geometric's Data."""
    examples = []
    for i in range(len(sparse)):
        atoms, adj, labels = sparse[i]
        columns = adj.indices.astype('i8')
        edges = numpy.stack((columns // adj.n_relations, adj.entry_rows()))
        data = Data(
            x=torch.from_numpy(atoms.astype('i8')),
            edge_index=torch.from_numpy(edges),
            y=torch.from_numpy(labels[None]),
        )
        if adj.n_relations > 1:
            data.edge_type = torch.from_numpy(columns % adj.n_relations)
        elif adj.data is not None:
            data.edge_attr = torch.from_numpy(adj.data)
        examples.append(data)
    return examples


def torch_device(device):
    """Return PyTorch's device for a device of Chainer."""
    return torch.device('cpu') if device.xp is numpy else torch.device('cuda', device.device.id)


def network(method, n_unit, n_layers, n_labels):
    """Return a peer's convolutions and head, on the host, from a fixed seed."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(n_unit, n_unit), nn.ReLU(), nn.Linear(n_unit, n_labels))
    return nn.Sequential(PEERS[method](n_unit, n_layers), head)


def _loss(y, t):
    if t.dtype.is_floating_point:
        return F.mse_loss(y, t)
    known = t >= 0
    total = F.binary_cross_entropy_with_logits(
        y, t.clamp(min=0).float(), known.float(), reduction='sum'
    )
    return total / known.sum().clamp(min=1)


class Loaded:
    """Train a model eagerly on the full batches of PyTorch Geometric's loader.

    `loss` is the loss of the last step, on the device.
    """

    def __init__(self, model, examples, n_batch, device, **adam):
        self._device = torch_device(device)
        self.model = model.to(self._device)
        self._optimizer = torch.optim.Adam(model.parameters(), **adam)
        loader = DataLoader(examples, n_batch, shuffle=True, drop_last=True)
        self._batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def run(self, n_steps):
        for _ in range(n_steps):
            batch = next(self._batches).to(self._device, non_blocking=True)
            self.loss = _loss(self.model(batch), batch.y)
            self._optimizer.zero_grad()
            self.loss.backward()
            self._optimizer.step()


class Static:
    """The arrays of a batch in fixed sizes, for a CUDA graph.

    Rows past the last molecule belong to one more graph, whose output is dropped. Edges past the
    last one connect rows that belong to no molecule.
    """

    def __init__(self, molecules, n_batch):
        arrays, order = molecules.molecules, molecules.order
        self._convert = CSRConverter('packed')
        self.n_batch = n_batch
        self.n_relations = arrays.n_relations
        self._has_values = arrays.data is not None
        self._labels = arrays.labels[0]
        rows = arrays.sizes[order]
        molecule = numpy.repeat(numpy.arange(len(arrays)), arrays.nnz)
        relation = arrays.columns % self.n_relations
        counts = [
            numpy.bincount(molecule[relation == r], minlength=len(arrays))[order]
            for r in range(self.n_relations)
        ]
        # GraphUpdater would choose these sizes, too.
        self.sizes = [
            tuple(sizes.bound(values, n_batch, deviations) for values in (rows, *counts))
            for deviations in sizes.DEVIATIONS
        ]

    def layout(self, size):
        """Return name -> (shape, dtype) of the arrays; `size`: rows, edges of every relation."""
        arrays = {'x': ((size[0],), 'i8'), 'batch': ((size[0],), 'i8')}
        for r, n_edges in enumerate(size[1:]):
            arrays['edges_%d' % r] = (2, n_edges), 'i8'
        if self._has_values:
            arrays['edge_attr'] = (size[1],), 'f4'
        arrays['y'] = (self.n_batch,) + self._labels.shape[1:], self._labels.dtype
        return arrays

    def convert(self, examples):
        """Return a batch's arrays on the host, and the smallest size that holds it."""
        atoms, adj, labels = self._convert(examples)
        rows = adj.entry_rows()
        source = adj.indices
        edges = []
        if self.n_relations > 1:
            source, relation = numpy.divmod(source, self.n_relations)
            for r in range(self.n_relations):
                of = numpy.flatnonzero(relation == r)
                edges.append((source[of], rows[of]))
        else:
            edges.append((source, rows))
        need = (len(atoms) + 1, *(len(pair[0]) for pair in edges))
        for size in self.sizes:
            if all(has >= asked for has, asked in zip(size, need)):
                return (atoms, adj, labels, edges), size
        self.sizes.append(
            tuple(max(values) for values in zip(self.sizes[-1], map(sizes.round_up, need)))
        )
        return (atoms, adj, labels, edges), self.sizes[-1]

    def write(self, views, arrays):
        """Fill the host arrays of :meth:`layout` with the result of :meth:`convert`."""
        atoms, adj, labels, edges = arrays
        n = len(atoms)
        views['x'][:n] = atoms
        views['x'][n:] = 0
        views['batch'][:n] = numpy.repeat(numpy.arange(self.n_batch), numpy.diff(adj.row_offsets))
        views['batch'][n:] = self.n_batch
        for r, pair in enumerate(edges):
            view = views['edges_%d' % r]
            used = len(pair[0])
            view[0, :used], view[1, :used] = pair
            # Spare edges are spread over several rows, because additions to one row would have to
            # wait for each other.
            view[:, used:] = n + numpy.arange(view.shape[1] - used) % (len(views['x']) - n)
        if self._has_values:
            views['edge_attr'][: adj.nnz] = adj.data
            views['edge_attr'][adj.nnz :] = 0
        views['y'][...] = labels

    def loss(self, model, tensors):
        """Return the loss of a model on tensors of :meth:`layout`."""
        edges = [tensors['edges_%d' % r] for r in range(self.n_relations)]
        conv, head = model
        h = conv(
            types.SimpleNamespace(
                x=tensors['x'],
                edge_index=edges if self.n_relations > 1 else edges[0],
                edge_attr=tensors.get('edge_attr'),
                edge_type=None,
                batch=tensors['batch'],
                num_graphs=self.n_batch + 1,
            )
        )
        return _loss(head(h[:-1]), tensors['y'])


class Captured:
    """Train with a CUDA graph of forward, backward and update for each size of a batch.

    Batches come from a SparseDataset's iterator. This package's converter, which is faster than the
    loader, makes them on the host; they are written to pinned memory and sent in one copy. The
    first batch of a size is captured. `loss` is the loss of the last step, on the device; the next
    step overwrites it.
    """

    def __init__(self, model, iterator, device, **adam):
        self._device = device
        self._iterator = iterator
        torch.cuda.set_device(device.device.id)
        self.model = model.to(torch_device(device))
        self._static = Static(iterator.dataset, iterator.batch_size)
        self._optimizer = torch.optim.Adam(model.parameters(), capturable=True, fused=True, **adam)
        self._programs = {}  # size -> [Staging, graph, loss, number of replays]

    def run(self, n_steps):
        for _ in range(n_steps):
            arrays, size = self._static.convert(self._iterator.next())
            if size not in self._programs:
                self._programs[size] = self._capture(arrays, size)
            program = self._programs[size]
            staged, graph, self.loss, _ = program
            self._static.write(staged.fill(), arrays)
            staged.send(cuda.cupy.cuda.get_current_stream())
            graph.replay()
            program[3] += 1

    def _capture(self, arrays, size):
        """Capture a step on a batch; parameters and the optimizer's states stay as they are."""
        staged = Staging(self._static.layout(size), self._device)
        tensors = {name: torch.from_dlpack(array) for name, array in staged.device.items()}
        self._static.write(staged.fill(), arrays)
        staged.send(cuda.cupy.cuda.get_current_stream())
        parameters = list(self.model.parameters())
        values = [parameter.detach().clone() for parameter in parameters]
        states = {
            parameter: {name: value.clone() for name, value in state.items()}
            for parameter, state in self._optimizer.state.items()
        }
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(tensors)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad()  # so that new gradients are in the graph's memory
        with torch.cuda.graph(graph):
            loss = self._step(tensors)
        with torch.no_grad():
            for parameter, value in zip(parameters, values):
                parameter.copy_(value)
                for name, now in self._optimizer.state[parameter].items():
                    before = states.get(parameter, {}).get(name)
                    now.zero_() if before is None else now.copy_(before)
        return [staged, graph, loss, 0]

    def _step(self, tensors):
        self._optimizer.zero_grad()
        loss = self._static.loss(self.model, tensors)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def replay(self):
        """Replay the most used graph with the batch in its buffers."""
        max(self._programs.values(), key=lambda program: program[3])[1].replay()
