"""PyTorch Geometric's GIN on a single graph, of the same shape as Chainer Chemistry's GINSparse."""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GINConv

WARM = 3  # steps before the capture


def _mlp(n_in, n_unit, n_out):
    return nn.Sequential(nn.Linear(n_in, n_unit), nn.ReLU(), nn.Linear(n_unit, n_out))


class GIN(nn.Module):
    def __init__(self, n_in, n_unit, n_out, n_layers):
        super().__init__()
        self.first = _mlp(n_in, n_unit, n_unit)
        outs = [n_unit] * (n_layers - 1) + [n_out]
        self.layers = nn.ModuleList(GINConv(_mlp(n_unit, n_unit, out)) for out in outs)

    def forward(self, x, edges, dropout):
        h = self.first(x)
        for i, layer in enumerate(self.layers):
            h = F.dropout(layer(h, edges), dropout, self.training)
            if i < len(self.layers) - 1:
                h = F.relu(h)
        return h


class Trainer:
    """Train on the labels of some nodes; each step also reports metrics on others.

    x: (n_nodes, n_words) float32; edges: (2, n_edges); y: (n_nodes,); train, valid: node indices.
    """

    def __init__(self, x, edges, y, train, valid, n_unit, n_layers, dropout, device, is_captured):
        arrays = x, edges, y, train, valid
        self._arrays = [torch.as_tensor(array).to(device) for array in arrays]
        self._arrays[1:] = [array.long() for array in self._arrays[1:]]
        self._dropout = dropout
        self._model = GIN(x.shape[1], n_unit, int(y.max()) + 1, n_layers).to(device)
        self._optimizer = torch.optim.Adam(self._model.parameters(), capturable=is_captured)
        self.reported = None
        self._graph = self._capture() if is_captured else None

    def _step(self):
        x, edges, y, *nodes = self._arrays
        scores = self._model(x, edges, self._dropout)
        losses = [F.cross_entropy(scores[part], y[part]) for part in nodes]
        with torch.no_grad():
            right = [(scores[part].argmax(1) == y[part]).float().mean() for part in nodes]
        self._optimizer.zero_grad(set_to_none=True)
        losses[0].backward()
        self._optimizer.step()
        self.reported = [value.detach() for value in (*losses, *right)]

    def _capture(self):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self._step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def run(self, n_steps):
        for _ in range(n_steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def wait(self):
        if self._arrays[0].is_cuda:
            torch.cuda.synchronize()
