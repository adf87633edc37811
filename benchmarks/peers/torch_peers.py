"""The product in PyTorch and in PyTorch Geometric, and CUDA graphs of calls of them."""

import warnings

import cupy
import torch
import torch_geometric.nn


def sparse_mm(adj, x):
    """Return a function that computes Y = A X by ``torch.sparse.mm`` on one block-diagonal CSR."""
    with warnings.catch_warnings():  # PyTorch warns that CSR tensors are in beta
        warnings.simplefilter('ignore', UserWarning)
        matrix = torch.sparse_csr_tensor(
            *map(torch.from_dlpack, (adj.indptr, adj.indices, adj.data)), size=adj.shape
        )
    x = torch.from_dlpack(x)
    return lambda: torch.sparse.mm(matrix, x)


def geometric(adj, x):
    """Return a function that computes Y = A X by PyTorch Geometric's message passing.

    Like PyTorch Geometric's layers by default, the function takes a list of edges: it gathers the
    rows of x, multiplies them by the values, and adds them up by target.
    """
    layer = torch_geometric.nn.SimpleConv(aggr='sum')
    edges = torch.from_dlpack(cupy.stack([adj.indices, adj.entry_rows()]).astype('i8'))
    values, x = torch.from_dlpack(adj.data), torch.from_dlpack(x)
    return lambda: layer(x, edges, values)


def versions():
    return {'torch': torch.__version__, 'torch_geometric': torch_geometric.__version__}


class _Replays:
    """A CUDA graph of PyTorch, with the method ``launch`` of CuPy's graphs."""

    def __init__(self, stream, graph):
        self._stream, self._graph = stream, graph

    def launch(self, _):
        with torch.cuda.stream(self._stream):
            self._graph.replay()


class Eager:
    """Replacement of a graph that makes the calls one after the other, if capture is refused."""

    def __init__(self, stream, call, n_calls):
        self._stream, self._call, self._n_calls = stream, call, n_calls

    def launch(self, stream):
        with torch.no_grad(), torch.cuda.stream(self._stream), stream:
            for _ in range(self._n_calls):
                self._call()


def _for_cupy(stream):
    with warnings.catch_warnings():  # deprecated in CuPy 14, but CuPy 13 lacks its successor
        warnings.simplefilter('ignore', DeprecationWarning)
        return cupy.cuda.ExternalStream(stream.cuda_stream)


def capture(call, n_calls):
    """Capture as :func:`benchmarks.products.measure.capture` does, in PyTorch's memory pool.

    Launches of `call` through CuPy are captured, too. If PyTorch refuses, an :class:`Eager` is
    returned instead of the graph.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    cupy_stream = _for_cupy(stream)
    with torch.no_grad(), torch.cuda.stream(stream), cupy_stream:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        try:
            graph.capture_begin()
            try:
                for _ in range(n_calls):
                    call()
            finally:
                graph.capture_end()  # it also raises if a call has broken the capture
        except RuntimeError:
            stream = torch.cuda.Stream()  # a new one, because the other one is in a bad state
            return Eager(stream, call, n_calls), _for_cupy(stream), stream
    return _Replays(stream, graph), cupy_stream, (call, stream)
