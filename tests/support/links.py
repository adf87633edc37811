"""An update link alone against Chainer Chemistry's."""

from chainer.backends import cuda

from chainer_bspmm.sparse import BatchedCSR
from tests.support import relative_error
from tests.support.parity import sparse_link


def check_update_link(device, sparse, dense, arguments, h, adj, *conditions, options=None):
    """Compare a swapped link in every layout, and a new one with it.

    All rows of the batch are atoms: packed and padded are the same.

    Args:
        device (chainer.backend.Device): where the sparse one runs.
        sparse (type), dense (chainer.Link): our class, and upstream's link, which was called.
        arguments (tuple), options (dict): of the constructor.
        h (array): (n_graphs, n_nodes, n_channels), on the host.
        adj (array): as upstream takes it; `conditions`, more arguments of its link.
    """
    expected = dense(h, adj, *conditions).array
    n_graphs, n_nodes, n_channels = h.shape
    matrices = list(adj[:, 0] if adj.ndim == 4 and adj.shape[1] == 1 else adj)
    links = sparse_link(sparse, dense), sparse(*arguments, **(options or {}))
    names = [[name for name, _ in dense.namedparams()]]
    for link in links:
        link.to_device(device)
        for layout, shape in (
            ('padded', (n_graphs, n_nodes)),
            ('packed', (n_graphs * n_nodes,)),
            ('padded', (n_graphs * n_nodes,)),
        ):
            batch = BatchedCSR.from_matrices(matrices, layout).to_device(device)
            y = link(device.send(h.reshape(shape + (n_channels,))), batch).array
            assert y.shape == shape + expected.shape[-1:]
            if link is links[0]:
                actual = cuda.to_cpu(y).reshape(expected.shape)
                assert relative_error(actual, expected) < 1e-5
        names.append([name for name, _ in link.namedparams()])
    assert names[0] == names[1] == names[2]
    return links[1]
