"""Gradients of several ranks, which are packed, added up, and unpacked as their mean."""

import ctypes
import types

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.training import flat_gradients
from chainer_bspmm.training.flat_gradients import FlatGradients, raise_if_not_finite
from tests.emulation.kernel_cases import integers, Peers, words

SHAPES = (), (0,), (3, 5), (1024,), (1025,), (2, 0), (2, 1025)
LARGEST = {'d': 200}  # keeps sums over ranks exact in float16
N_MOLECULES = 2, 6, 0  # each rank's; means are exact, because the sum is a power of two
RANK = 1
# These tests write to memory of the host, which the process of a sanitizer lacks.
pinned = pytest.mark.parametrize('device', ['plain'], indirect=True)


def ranks(device, dtypes, shapes=SHAPES, dtype=None):
    """Return the optimizer of rank 1 of 3, and the gradients of all ranks."""
    link = chainer.Link()
    gradients = []
    for i, shape in enumerate(shapes):
        kind = dtypes[i % len(dtypes)]
        gradients.append([integers(shape, 'd', LARGEST, 10 * i + rank) for rank in range(3)])
        with link.init_scope():
            param = chainer.Parameter(device.put(numpy.zeros(shape, kind)))
            setattr(link, 'p%03d' % i, param)
        param.grad = device.put(gradients[-1][RANK].astype(kind))
        device.reachable.append(param.grad)
    comm = types.SimpleNamespace(
        rank=RANK, size=3, allreduce_grad_dtype=dtype and numpy.dtype(dtype)
    )
    return types.SimpleNamespace(target=link, communicator=comm, t=6), gradients


def sent_by(rank, gradients, bad=()):
    """Return the flat array that a rank has to send."""
    scaled = [N_MOLECULES[rank] * numpy.ravel(of_ranks[rank]) for of_ranks in gradients]
    flags = [float(rank == other and rank in bad) for other in range(3)]
    return numpy.concatenate([*scaled, [N_MOLECULES[rank]], flags])


@pytest.fixture
def made(device, monkeypatch):
    """Function that makes `FlatGradients` whose collective adds the arrays of other ranks."""

    def of(optimizer, others):
        flat = FlatGradients(optimizer)

        def all_reduce(send, receive, count, kind, operation, stream):
            assert (send, receive) == (flat.sent.ctypes.data, flat._sum.ctypes.data)
            assert (kind, operation, stream) == (flat.sent.dtype.char, 'sum', 5)
            total = sum(others, flat.sent.astype('d')).astype(flat.sent.dtype)
            ctypes.memmove(receive, total.ctypes.data, count * total.itemsize)

        if others:
            optimizer.communicator.nccl_comm = types.SimpleNamespace(allReduce=all_reduce)
        optimizer.communicator._init_comms = lambda: None
        return flat

    from chainermn import nccl

    for char, name in zip('efd', ('FLOAT16', 'FLOAT32', 'FLOAT64')):
        monkeypatch.setattr(nccl, 'NCCL_' + name, char, raising=False)
    monkeypatch.setattr(nccl, 'NCCL_SUM', 'sum', raising=False)
    # The emulator's stand-in for CuPy gets these attributes.
    cuda.cupy.cuda.alloc_pinned_memory = bytearray
    cuda.cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=5)
    return of


def check(device, made, dtypes, shapes=SHAPES, dtype=None, loss=1, loss_dtype='f', bad=()):
    """Pack, add up and unpack; check the sent array and the gradients."""
    optimizer, gradients = ranks(device, dtypes, shapes, dtype)
    flat = made(optimizer, [sent_by(rank, gradients, bad) for rank in (0, 2)])
    assert flat.sent.dtype == (dtype or max(dtypes, key='efd'.index))
    flat.pack(N_MOLECULES[RANK], device.put(numpy.array(loss, loss_dtype)))
    numpy.testing.assert_array_equal(flat.sent, sent_by(RANK, gradients, bad))
    flat.add_up()
    flat.unpack()
    check_means(optimizer, gradients, bad)
    return flat


def check_means(optimizer, gradients, bad=()):
    """Compare the gradients with the means over all ranks, which are 0 if a rank is bad."""
    for i, of_ranks in enumerate(gradients):
        param = getattr(optimizer.target, 'p%03d' % i)
        mean = numpy.average(of_ranks, axis=0, weights=N_MOLECULES)
        assert param.grad.dtype == param.dtype
        numpy.testing.assert_array_equal(param.grad, 0 * mean if bad else mean)


def find_copies(device):
    """Allow addresses of arrays that are made from now on in the kernel's table."""
    put = device.put

    def put_within_reach(array):
        copy = put(array)
        device.reachable.append(copy)
        return copy

    device.put = put_within_reach


def chunks_of(shapes):
    return [-(-numpy.prod(shape, dtype=int) // flat_gradients._CHUNK) for shape in shapes]


@pinned
@pytest.mark.parametrize('n_sms', (132, 1))
@pytest.mark.parametrize('dtypes, bad', [('f', ()), ('fd', ()), ('f', (RANK,)), ('f', (2,))])
def test_ranks_that_write_to_the_memory_of_each_other(device, made, dtypes, bad, n_sms):
    device.sizes = Device(n_sms, 60 << 20)
    optimizer, gradients = ranks(device, dtypes)
    flat = made(optimizer, [])
    others = {rank: sent_by(rank, gradients, bad) for rank in (0, 2)}
    flat.peers = peers = Peers(device, flat, RANK, others)
    expected = [array.copy() for array in peers.arrays]
    loss = device.put(numpy.array(numpy.nan if RANK in bad else 1, 'f'))
    flat.pack(N_MOLECULES[RANK], loss, alone=True)
    sent = sent_by(RANK, gradients, bad)
    numpy.testing.assert_array_equal(flat.sent, sent)
    for found, of_rank in zip(peers.arrays, expected):
        numpy.testing.assert_array_equal(found, of_rank)
    assert set(peers.turn.tolist()) == {6}
    flat.sent[...] = -5
    flat.pack(N_MOLECULES[RANK], loss)
    numpy.testing.assert_array_equal(flat.sent, sent)
    for rank in (0, 2):
        expected[rank][Peers.TURN % 2, RANK] = words(flat.sent, Peers.TURN)
    for found, of_rank in zip(peers.arrays, expected):
        numpy.testing.assert_array_equal(found, of_rank)
    by_dtype = [sum(chunks_of(SHAPES[i :: len(dtypes)])) for i in range(len(dtypes))]
    # Each block counts its turns.
    assert peers.turn.tolist().count(7) == sum(min(n, 2 * n_sms) for n in by_dtype)
    flat.add_up()  # calling NCCL would be an error here
    flat.unpack()
    assert flat._is_bad.tolist() == [int(rank in bad) for rank in range(3)]
    check_means(optimizer, gradients, bad)


def test_memory_for_parameters_of_other_sizes_is_not_used(device, made):
    """In memory for fewer parameters, ranks would write past the end."""
    shapes = [(3, 5), (1025,)]
    optimizer, _ = ranks(device, 'f', shapes)
    peers = Peers(device, made(optimizer, []), RANK, {})
    assert FlatGradients(optimizer, peers).peers is peers
    larger, _ = ranks(device, 'f', [*shapes, (1,)])
    assert FlatGradients(larger, peers).peers is None


@pytest.mark.parametrize('dtypes', ('f', 'd', 'fd'))
def test_mean_over_ranks(device, made, dtypes):
    raise_if_not_finite(check(device, made, dtypes)._optimizer)


@pytest.mark.parametrize('dtype', 'efd')
def test_dtype_of_a_communicator(device, made, dtype):
    check(device, made, 'fd', dtype=dtype)


def test_more_parameters_than_a_table_has_room_for(device, made):
    check(device, made, 'f', (3,) * (2 * flat_gradients._N_PARAMETERS + 1))
    assert [launch['PACK'] for launch in device.launched] == [1, 1, 1, 0, 0, 0]


def test_parameters_without_elements(device, made):
    """The number of molecules and the flags are sent all the same."""
    check(device, made, 'f', ((0,), (2, 0)))


def test_sums_of_float16_are_float32(device, made):
    optimizer, _ = ranks(device, 'e')
    assert made(optimizer, []).sent.dtype == numpy.float32


def test_parameters_are_packed_in_the_order_of_their_paths(device, made):
    """Ranks may have added the parameters' links in another order."""
    optimizer, gradients = ranks(device, 'f', ((2,), (3,)))
    params = {name: getattr(optimizer.target, name) for name in ('p001', 'p000')}
    optimizer.target.namedparams = lambda include_uninit: iter(params.items())
    flat = made(optimizer, [])
    flat.pack(N_MOLECULES[RANK], device.put(numpy.array(1, 'f')))
    numpy.testing.assert_array_equal(flat.sent, sent_by(RANK, gradients))


@pinned
@pytest.mark.parametrize('loss_dtype', 'efd')
@pytest.mark.parametrize('loss', (numpy.nan, numpy.inf, -numpy.inf))
def test_own_loss_is_not_finite(device, made, loss, loss_dtype):
    flat = check(device, made, 'f', loss=loss, loss_dtype=loss_dtype, bad=(RANK,))
    assert flat._is_bad.tolist() == [0, 1, 0]
    with pytest.raises(FloatingPointError, match='the loss of rank 1 .* noticed after step 6'):
        raise_if_not_finite(flat._optimizer)
    raise_if_not_finite(flat._optimizer)  # the error is raised only once


@pinned
def test_loss_of_another_rank_is_not_finite(device, made, monkeypatch):
    monkeypatch.setattr(flat_gradients.faults, 'PATIENCE', 0)
    flat = check(device, made, 'fd', loss=-1, bad=(2,))
    assert flat._is_bad.tolist() == [0, 0, 1]
    with pytest.raises(
        FloatingPointError, match='the loss of rank 2 is not finite, noticed after step 6'
    ):
        raise_if_not_finite(flat._optimizer)


def test_gradient_that_is_a_view(device, made):
    optimizer, gradients = ranks(device, 'f', ((3, 5),))
    flat = made(optimizer, [])
    optimizer.target.p000.grad = device.put(gradients[0][RANK].astype('f').T).T
    loss = device.put(numpy.array(1, 'f'))
    find_copies(device)
    flat.pack(N_MOLECULES[RANK], loss)
    numpy.testing.assert_array_equal(flat.sent, sent_by(RANK, gradients))


@pinned
@pytest.mark.parametrize('n_params', (3, 2 * flat_gradients._N_PARAMETERS + 1))
def test_parameters_with_one_gradient(device, made, n_params):
    """Terms of a sum share a gradient; the last parameter has a part of it."""
    optimizer, gradients = ranks(device, 'f', ((1, 5),) * (n_params - 1) + ((1, 3),))
    params = [getattr(optimizer.target, 'p%03d' % i) for i in (0, n_params - 2, n_params - 1)]
    params[1].grad = params[0].grad
    params[2].grad = params[0].grad[:, 2:]
    gradients[n_params - 2] = gradients[0]
    gradients[n_params - 1] = [array[:, 2:] for array in gradients[0]]
    flat = made(optimizer, [])
    others = {rank: sent_by(rank, gradients) for rank in (0, 2)}
    flat.peers = Peers(device, flat, RANK, others)
    loss = device.put(numpy.array(1, 'f'))
    find_copies(device)
    flat.pack(N_MOLECULES[RANK], loss)
    check_means(optimizer, gradients)
