import types

import mmap
import numpy
import pytest

from chainer.backend import CpuDevice
from chainer.backends import cuda

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda.plans import Device
from chainer_bspmm.dataset.batch_form import Capacity, new_buffers
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.gather_batch import gather_launch
from chainer_bspmm.sparse.batched_csr import Buffers, fill_buffers
from tests.emulation.emulator.cuda_on_cpu import build, run
from tests.support.data_sets import assert_same_batch, LABELS, molecule_set
from tests.support.devices import slow_unless

MAP_NORESERVE = 0x4000  # Linux
NULL = numpy.uintp(0)
INDEX = (3, 0, 6, 5, 5, 2, 1, 7, 0)
INDICES = [INDEX, (0,), (2,), (2, 6), (4,), (7,), (1, 4, 1), tuple(range(8))]


def on_device(device, molecules):
    """Return `DeviceMolecules` on the emulated device."""
    emulated = CpuDevice()
    emulated.send = device.put
    return DeviceMolecules(molecules, emulated)


def check_exact(device, molecules, index, layout='packed', padded_to=None):
    """Compare a batch with the one that the host gathers; return the number of launches."""
    before = len(device.launched)
    index = numpy.array(index)
    atoms, adj, labels = on_device(device, molecules).batch(index, layout, padded_to)
    assert not adj.has_spare
    e_atoms, e_adj, e_labels = molecules.batch(index, layout, padded_to)
    assert_same_batch((atoms, adj, *labels), (e_atoms, e_adj, *e_labels))
    assert (adj.data is None) == (e_adj.data is None)
    assert adj.data is None or adj.data.dtype == e_adj.data.dtype
    return len(device.launched) - before


def empty_like(buffer):
    """Return a buffer like a field of `Buffers`: an array, a list of arrays, or None."""
    if isinstance(buffer, list):
        return [numpy.empty_like(array) for array in buffer]
    return None if buffer is None else numpy.empty_like(buffer)


def check_spare(device, molecules, index, spare, layout='packed', padded_to=None):
    """Compare whole buffers, first filled with 127 or NaN, with buffers that the host fills."""
    before = len(device.launched)
    index = numpy.array(index)
    atoms, adj, labels = molecules.batch(index, layout, padded_to)
    target = on_device(device, molecules)
    capacity = Capacity(adj.n_rows + spare[0], adj.nnz + spare[1], 0, 0, -1)
    form = target.form(index.size, True, 1, layout, padded_to)
    buffers = new_buffers(cuda.cupy.empty, form, capacity)
    size = None if padded_to is None else device.put(numpy.array([padded_to], 'i'))
    target.gather(device.put(target.check(index)), buffers, size)

    expected = Buffers(*map(empty_like, buffers))
    fill_buffers(expected, atoms, adj, labels)
    for name, actual in buffers._asdict().items():
        if name != 'labels':
            numpy.testing.assert_array_equal(actual, getattr(expected, name), name)
    for actual, label in zip(buffers.labels, expected.labels, strict=True):
        numpy.testing.assert_array_equal(actual, label)
    return len(device.launched) - before


def check_folded(device, molecules, index, padded_to, spare=(0, 0)):
    return check_spare(device, molecules, index, spare, 'folded', padded_to)


@pytest.mark.parametrize('layout', [('packed',), ('folded',), ('folded', 6)], ids=str)
@pytest.mark.parametrize('index', INDICES, ids=str)
def test_molecules(device, index, layout):
    assert check_exact(device, molecule_set(), index, *layout) == 1


@pytest.mark.parametrize('data', [None, 'e', 'f', 'd'])
@pytest.mark.parametrize('n_relations', [1, 4])
def test_values_of_relations(device, n_relations, data):
    molecules = molecule_set(n_relations=n_relations, data=data)
    check_exact(device, molecules, INDEX)
    check_folded(device, molecules, INDEX, 40, spare=(3, 5))


@pytest.mark.parametrize('atoms', ['e', 'f', 'd'])
def test_features(device, atoms):
    molecules = molecule_set(atoms=atoms)
    check_exact(device, molecules, INDEX)
    check_spare(device, molecules, INDEX, (3, 5))
    check_folded(device, molecules, INDEX, 40, spare=(3, 5))


@pytest.mark.parametrize('labels', LABELS)
def test_labels(device, labels):
    launches = check_exact(device, molecule_set(labels=labels), INDEX)
    assert launches == (3 if labels == 'five' else 1)


@pytest.mark.parametrize('spare', [(0, 0), (1, 0), (0, 1), (3, 700), (900, 3)], ids=str)
@pytest.mark.parametrize('data', [None, 'e', 'f'])
def test_capacity_beyond_the_batch(device, data, spare):
    molecules = molecule_set(labels='five', data=data, n_relations=2)
    assert check_spare(device, molecules, INDEX, spare) == 3
    assert check_folded(device, molecules, INDEX, 40, spare) == 3


def test_only_empty_molecules(device):
    check_spare(device, molecule_set(), (2, 6, 2), (5, 7))
    check_folded(device, molecule_set(), (2, 6, 2), 4)
    check_folded(device, molecule_set(), (2, 6, 2), 0, spare=(5, 7))


@pytest.mark.parametrize('n_entries', [64, 65, 97, 130])
def test_molecules_of_many_entries(device, n_entries):
    molecules = molecule_set((20, 3))
    row_nnz = numpy.zeros(23, 'i')
    row_nnz[:20] = numpy.diff(numpy.arange(21) * n_entries // 20)
    columns = numpy.random.RandomState(0).randint(0, 20, n_entries).astype('i')
    fields = dict(molecules.fields(), row_nnz=row_nnz, columns=columns)
    fields['data'] = numpy.arange(n_entries, dtype='f')
    check_exact(device, type(molecules)(**fields), (1, 0, 0))


@pytest.mark.parametrize('sizes, index', [((1, 4), (1,)), ((4, 1, 4), (0, 2)), ((2, 4), (1,))])
def test_small_atoms_that_are_not_aligned_in_the_data_set(device, sizes, index):
    molecules = molecule_set(sizes)
    fields = dict(molecules.fields(), atoms=molecules.atoms.astype('b'))
    check_exact(device, type(molecules)(**fields), index)


def test_data_set_without_entries(device):
    molecules = molecule_set(sizes=(3, 4, 3))
    assert not molecules.columns.size
    check_exact(device, molecules, (2, 0))
    check_spare(device, molecules, (2, 0), (1, 1))


@pytest.mark.parametrize(
    'index, padded_to',
    [
        *((index, 38) for index in INDICES),
        *((INDICES[0], padded_to) for padded_to in (0, 5, 36, 2**24)),
    ],
    ids=str,
)
def test_folded_molecules(device, index, padded_to):
    check_folded(device, molecule_set(), index, padded_to)


@pytest.mark.parametrize(
    'n_graphs, n_sms', [slow_unless(False, 1500, 132), (300, 4), (8, 1), (9, 1), (65, 1)]
)
def test_many_graphs(device, n_graphs, n_sms):
    device.sizes = Device(n_sms, 60 << 20)
    rng = numpy.random.RandomState(0)
    molecules = molecule_set(rng.randint(0, 6, 300))
    index = rng.randint(0, 300, n_graphs)
    check_exact(device, molecules, index)
    check_folded(device, molecules, index, 5)


def test_offsets_beyond_32_bits(gxx):
    """The second of two molecules begins 2**31 bytes behind the first, whose block is left out."""
    n_nodes = 2**11 + 1
    atom_bytes = 2**20
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE
    memory = [mmap.mmap(-1, n_nodes * atom_bytes, flags=flags) for _ in range(2)]
    places = [numpy.uintp(numpy.frombuffer(each, 'b').ctypes.data) for each in memory]
    memory[0][2**31 : 2**31 + 4] = b'last'
    rows = numpy.zeros(n_nodes + 1, 'i')
    entries = numpy.zeros(0, 'i')
    first = 'first = blockIdx.x * graphs_per_block;'
    text = kernels.source('gather_batch')
    assert first in text
    options = kernels.options('f', (('VECTOR', 1), ('LABELS_ONLY', 0), ('FOLDED', 0)))
    program = build(text.replace(first, 'first = 1;'), 'gather_batch', options)
    index = numpy.array([0, 1], 'i')
    first_nodes = numpy.array([0, n_nodes - 1, n_nodes])
    first_entries = numpy.zeros(3, numpy.int64)
    source = places[0], rows, entries, NULL, NULL, NULL, NULL
    target = places[1], rows.copy(), entries, NULL
    offsets = numpy.zeros(3, 'i'), numpy.zeros(3, 'i')
    no_weights_or_labels = NULL, NULL, NULL
    sizes = map(numpy.int32, (2, 2, n_nodes, 0, 1, atom_bytes, 0, 0, 0))
    run(
        program,
        (1, 1, 1),
        (32, 1, 1),
        (
            index,
            first_nodes,
            first_entries,
            *source,
            *target,
            *offsets,
            *no_weights_or_labels,
            *sizes,
        ),
    )
    assert memory[1][2**31 : 2**31 + 4] == b'last'


def test_policy():
    device = types.SimpleNamespace(n_sms=132)
    for n_graphs in (1, 7, 8, 9, 128, 1500, 2112, 2113, 10**4, 10**6):
        launch = gather_launch.__wrapped__(n_graphs, device)
        blocks, threads = launch.grid[0], launch.block[0]
        assert launch.arguments[0] == n_graphs
        assert (blocks - 1) * launch.arguments[1] < n_graphs <= blocks * launch.arguments[1]
        assert blocks <= 264 and threads % 32 == 0 and 256 <= threads <= 512
