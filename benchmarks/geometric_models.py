"""PyTorch Geometric's networks of the shape that Chainer Chemistry's have, and their batches."""
import time

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.nn import GINConv
from torch_geometric.nn import RGCNConv
from torch_geometric.nn import global_add_pool

from chainer_chemistry.config import MAX_ATOMIC_NUM

N_EDGE_TYPES = 4


class GatedReadout(nn.Module):
    """sum over the nodes of sigmoid(W_i x) * activation(W_j x)."""

    def __init__(self, n_in, n_out, bias, activation):
        super().__init__()
        self.gate = nn.Linear(n_in, n_out, bias=bias)
        self.value = nn.Linear(n_in, n_out, bias=bias)
        self.activation = activation

    def forward(self, x, batch, n_graphs):
        x = torch.sigmoid(self.gate(x)) * self.activation(self.value(x))
        return global_add_pool(x, batch, n_graphs)


class GCN(nn.Module):
    """RSGCN: convolutions without bias over given values, dropout, rectifier, sum."""

    def __init__(self, n_unit, n_layers):
        super().__init__()
        self.embed = nn.Embedding(MAX_ATOMIC_NUM, n_unit)
        self.layers = nn.ModuleList(
            GCNConv(n_unit, n_unit, normalize=False, add_self_loops=False, bias=False)
            for _ in range(n_layers))

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
            GINConv(nn.Sequential(nn.Linear(n_unit, n_unit), nn.ReLU(),
                                  nn.Linear(n_unit, n_unit), nn.ReLU()))
            for _ in range(n_layers))
        self.readout = GatedReadout(2 * n_unit, n_unit, True, nn.Identity())

    def forward(self, data):
        h = h0 = self.embed(data.x)
        for layer in self.layers:
            h = F.dropout(layer(h, data.edge_index), 0.5, self.training)
        return self.readout(torch.cat((h, h0), 1), data.batch, data.num_graphs)


class RGCN(nn.Module):
    """RelGCN in the widths of Chainer Chemistry's default; neighbours are added unscaled."""

    def __init__(self, n_unit, n_layers):
        super().__init__()
        widths = (16, 128, 64)
        self.embed = nn.Embedding(MAX_ATOMIC_NUM, widths[0])
        self.layers = nn.ModuleList(RGCNConv(*pair, N_EDGE_TYPES, aggr='add')
                                    for pair in zip(widths, widths[1:]))
        self.readout = GatedReadout(widths[-1], n_unit, False, torch.tanh)

    def forward(self, data):
        h = self.embed(data.x)
        for layer in self.layers:
            h = torch.tanh(layer(h, data.edge_index, data.edge_type))
        return self.readout(h, data.batch, data.num_graphs)


PEERS = {'rsgcn': GCN, 'gin': GIN, 'relgcn': RGCN}


def examples_of(sparse):
    """Return the molecules of a SparseDataset as PyTorch Geometric's Data."""
    examples = []
    for i in range(len(sparse)):
        atoms, adj, labels = sparse[i]
        columns = adj.indices.astype('i8')
        edges = numpy.stack((columns // adj.n_relations, adj.entry_rows()))
        given = {'edge_attr': None if adj.data is None else torch.from_numpy(adj.data)}
        if adj.n_relations > 1:
            given = {'edge_type': torch.from_numpy(columns % adj.n_relations)}
        examples.append(Data(x=torch.from_numpy(atoms.astype('i8')),
                             edge_index=torch.from_numpy(edges),
                             y=torch.from_numpy(labels[None]), **given))
    return examples


class Contender:
    """Train and predict in PyTorch Geometric; see `bench_training.Contender`."""

    is_chainer = False

    def __init__(self, method, examples, n_unit, n_layers, n_labels, device):
        self._examples = examples
        self._device = torch.device('cuda' if device.xp is not numpy else 'cpu')
        torch.manual_seed(0)
        head = nn.Sequential(nn.Linear(n_unit, n_unit), nn.ReLU(), nn.Linear(n_unit, n_labels))
        self._conv = PEERS[method](n_unit, n_layers)
        self._model = nn.Sequential(self._conv, head).to(self._device)
        self._optimizer = torch.optim.Adam(self._model.parameters())

    def train(self, index):
        self._model.train()
        clock = [time.perf_counter()]
        batch = self._convert(index, clock)
        loss = _loss(self._model(batch), batch.y)
        loss.item()  # as Chainer Chemistry reads its loss
        clock.append(time.perf_counter())
        self._optimizer.zero_grad()
        loss.backward()
        clock.append(time.perf_counter())
        self._optimizer.step()
        clock.append(time.perf_counter())
        self.synchronize()
        return clock + [time.perf_counter()]

    def predict(self, index):
        self._model.eval()
        clock = [time.perf_counter()]
        batch = self._convert(index, clock)
        with torch.no_grad():
            self._model(batch).cpu()
        return clock + [time.perf_counter()]

    def _convert(self, index, clock):
        fetched = [self._examples[i] for i in index]
        clock.append(time.perf_counter())
        batch = Batch.from_data_list(fetched).to(self._device)
        self.synchronize()
        clock.append(time.perf_counter())
        return batch

    def synchronize(self):
        if self._device.type == 'cuda':
            torch.cuda.synchronize()

    def peak_bytes(self, index):
        """Return what a step allocates at most beyond the parameters; None on the host."""
        if self._device.type != 'cuda':
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.train(index)
        return torch.cuda.max_memory_allocated() - before


def _loss(y, t):
    if t.dtype.is_floating_point:
        return F.mse_loss(y, t)
    known = t >= 0
    total = F.binary_cross_entropy_with_logits(y, t.clamp(min=0).float(), known.float(),
                                               reduction='sum')
    return total / known.sum().clamp(min=1)
