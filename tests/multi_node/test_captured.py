"""`GraphUpdater` on several ranks of MPI, with stand-ins for the GPU and for NCCL."""

import types

import chainer_bspmm  # noqa: F401  first
import chainer
import numpy
import pytest
from chainer.training import StandardUpdater

from chainer_bspmm.training import GraphUpdater
from tests.multi_node.test_optimizer import arrays_of
from tests.multi_node.test_optimizer import communicator
from tests.multi_node.test_optimizer import CONVERTERS
from tests.multi_node.test_optimizer import my_share
from tests.multi_node.test_optimizer import N_ALL
from tests.multi_node.test_optimizer import optimizer_of
from tests.multi_node.test_optimizer import regressor
from tests.support import relative_error
from tests.support.ranks import needs_mpi
from tests.support.ranks import on_ranks
from tests.support.training import molecules
from tests.training import host_graphs

N_STEPS = 30
SIZES = 7, 5  # molecules of the ranks


def trained(kind, name, comm=None, sizes=None):
    """Return the updater after training."""
    examples = my_share(molecules(4 * N_ALL), comm, sizes)
    # Ranks start from one state, which is not that of rank 1.
    model = regressor(name, comm.rank if comm else 0, comm if 'norm' in name else None)
    optimizer = optimizer_of(model, comm, chainer.optimizers.SGD(1e-4))
    chainer.global_config.tested_optimizer = getattr(optimizer, 'actual_optimizer', optimizer)
    iterator = chainer.iterators.SerialIterator(examples, len(examples) // 4, shuffle=False)
    updater = kind(iterator, optimizer, converter=CONVERTERS['packed'], device='@numpy')
    for _ in range(N_STEPS):
        updater.update()
    return updater


def train(name, path):
    comm, sent = communicator(), []

    def all_reduce(mine, received):
        sent.append(len(mine))
        comm.mpi_comm.Allreduce(mine, received)

    comm.nccl_comm = types.SimpleNamespace(allReduce=all_reduce)
    comm._init_comms, comm.allreduce_grad_dtype, comm.n_captured = lambda: None, None, 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        graphs = host_graphs.stand_in(monkeypatch)
        host_graphs.with_ranks(monkeypatch, comm)
        updater = trained(GraphUpdater, name, comm, SIZES)
    assert len(graphs) == 1
    if 'norm' in name:  # its statistics are those of all ranks: eagerly
        assert not sent and not graphs[0].n_launches
    else:
        assert len(sent) == N_STEPS and graphs[0].n_launches > N_STEPS / 2
    numpy.savez(path % comm.rank, **arrays_of(updater.get_optimizer('main').target))


@needs_mpi
@pytest.mark.parametrize('name', ('RSGCN', 'RSGCN, batch norm'))
def test_captured_ranks_are_one_large_batch(tmp_path, name):
    on_ranks(2, train, name, str(tmp_path / '%d.npz'))
    expected = arrays_of(trained(StandardUpdater, name).get_optimizer('main').target)
    for rank in range(2):
        with numpy.load(tmp_path / ('%d.npz' % rank)) as found:
            for name, array in expected.items():
                assert relative_error(found[name], array) < 1e-5, name
