"""Where batches come from: indices from the iterator, and a data set's copy on the GPU."""

import copy
import gc
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import backend, optimizers, serializers
from chainer.backends import cuda
from chainer.dataset import convert
from chainer.datasets import split_dataset, split_dataset_random, SubDataset, TransformDataset
from chainer.iterators import SerialIterator

from chainer_bspmm import CSRConverter
from chainer_bspmm.dataset import device_dataset, DeviceDataset, SparseDataset, to_sparse
from chainer_bspmm.dataset.batch_form import needs
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.molecules import INTEGERS
from chainer_bspmm.dataset.selection import locate, Selection
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.batched_csr import fill_buffers
from chainer_bspmm.training import batches, captured_predict, GraphUpdater
from chainer_bspmm.training.batches import DeviceBatch, Resident
from chainer_bspmm.training.iterators import Examples
from chainer_bspmm.training.sizes import STEP
from tests.support.data_sets import molecule_set
from tests.support.training import assert_same_bits, BATCH, HOST, make_model, make_updater
from tests.support.training import molecules, parameters, run, same_molecules, small_model
from tests.training import host_graphs

pytestmark = pytest.mark.filterwarnings('ignore:GraphUpdater updates eagerly')

CONVERTER = chainer_bspmm.concat_mols


@pytest.fixture
def dataset():
    return SparseDataset(molecule_set())


ORDER = numpy.random.RandomState(0).permutation(8)
DATA_SETS = {
    'whole': lambda whole: whole,
    'slice': lambda whole: whole[6:0:-2],
    'random split': lambda whole: split_dataset_random(whole, 5, seed=0)[0],
    'nested': lambda whole: SubDataset(SubDataset(whole[::-1], 1, 7, ORDER), 2, 6),
}


ITERATORS = {
    'shuffled': dict(batch_size=3),
    'in order': dict(batch_size=3, shuffle=False),
    'larger than the data set': dict(batch_size=17),
    'once': dict(batch_size=3, repeat=False),
    'once, in order': dict(batch_size=2, repeat=False, shuffle=False),
    'sampler': dict(batch_size=3, order_sampler=lambda order, position: order[::-1].copy()),
}


STATE = ('current_position', 'epoch', 'is_new_epoch', 'epoch_detail', 'previous_epoch_detail')


def state_of(iterator):
    serializer = serializers.DictionarySerializer()
    iterator.serialize(serializer)
    saved = {name: numpy.asarray(value).tolist() for name, value in serializer.target.items()}
    return [saved, *(copy.deepcopy(getattr(iterator, name)) for name in STATE)]


@pytest.mark.parametrize('options', ITERATORS)
@pytest.mark.parametrize('name', DATA_SETS)
def test_an_iterator_goes_on_as_if_it_had_given_examples(dataset, name, options):
    part = DATA_SETS[name](dataset)
    actual = []
    for take in (SerialIterator.next, lambda iterator: Examples().next(iterator, CONVERTER)):
        numpy.random.seed(0)
        iterator = SerialIterator(part, **ITERATORS[options])
        steps = []
        for _ in range(9):
            try:
                batch = take(iterator)
            except StopIteration:
                batch = None
            source, index = (None, None) if not batch else locate(batch)
            steps.append((source, None if batch is None else list(index), state_of(iterator)))
        actual.append(steps)
        assert batch is None or take is SerialIterator.next or isinstance(batch, Selection)
    assert actual[0] == actual[1]


OfUser = type('OfUser', (SerialIterator,), {})


def test_lists_of_everything_else(dataset):
    def given(iterator, converter=CONVERTER):
        return type(Examples().next(iterator, converter))

    assert given(SerialIterator(dataset, 3)) is Selection
    assert given(OfUser(dataset, 3)) is list
    assert given(SerialIterator(dataset, 3), type('Converting', (CSRConverter,), {})()) is list
    assert given(SerialIterator(list(dataset), 3)) is list
    assert given(SerialIterator(SubDataset(dataset, 0, 3, list(range(len(dataset)))), 3)) is list
    patched = SerialIterator(dataset, 3)
    patched.next = lambda: [dataset[0]]
    assert given(patched) is list


@pytest.mark.parametrize('name', DATA_SETS)
@pytest.mark.parametrize('wrong', [99, -99, 'the first past the end'])
def test_a_number_that_is_wrong(dataset, name, wrong):
    part = DATA_SETS[name](dataset)
    wrong = wrong if isinstance(wrong, int) else len(part)
    for take in (SerialIterator.next, lambda iterator: Examples().next(iterator, CONVERTER)):
        iterator = SerialIterator(part, len(part), order_sampler=lambda order, _: order * 0 + wrong)
        with pytest.raises(IndexError):
            take(iterator)


class Gpu(chainer.backend.CpuDevice):
    """The host, posing as a GPU with `free` bytes of free memory."""

    name = '@cupy:0'
    xp = numpy

    def __init__(self, free=2**30):
        super().__init__()
        self.device = types.SimpleNamespace(mem_info=(free, 2 * free))


def gather(self, index, buffers, padded_to=None):
    layout = ('packed', None) if padded_to is None else ('folded', int(padded_to[0]))
    fill_buffers(buffers, *self.host.batch(numpy.asarray(index, 'q'), *layout))


@pytest.fixture
def gpu(monkeypatch):
    """The host, posing as a GPU: NumPy stands in for the kernel that gathers."""
    for module in (batches, device_dataset):
        monkeypatch.setattr(module, 'cuda', types.SimpleNamespace(cupy=numpy))
    monkeypatch.setattr(DeviceMolecules, 'gather', gather)
    batch = DeviceMolecules.batch

    def batch_on_host(self, index, *options):
        if len(self) == len(index) == 1:  # a single molecule is copied, not gathered
            return batch(self, index, *options)
        return self.host.batch(index, *options)

    monkeypatch.setattr(DeviceMolecules, 'batch', batch_on_host)
    return Gpu()


@pytest.fixture
def there(device, request):
    return request.getfixturevalue('gpu') if device.xp is numpy else device


def test_parts_of_a_data_set_share_a_copy(gpu, dataset):
    train, valid = split_dataset_random(dataset, 5, seed=0)
    residents = [Resident(part, gpu) for part in (train, valid, dataset[2:])]
    copies = {id(each.of(dataset.molecules)) for each in residents}
    assert len(copies) == 1 and id(dataset.molecules) not in copies
    assert len(batches._copies) == 1


def test_a_copy_is_gone_with_its_last_owner(gpu, dataset):
    residents = [Resident(part, gpu) for part in (dataset, dataset[2:])]
    for resident in residents:
        resident.of(dataset.molecules)
    del resident, residents[0]
    gc.collect()
    assert len(batches._copies) == 1
    residents.clear()
    gc.collect()
    assert not batches._copies


def test_what_has_no_copy(gpu, dataset):
    host = dataset.molecules
    assert Resident(dataset, Gpu(free=80)).of(host) is host  # larger than an eighth
    assert Resident([(0, 0)], gpu).of(host) is host
    other = molecule_set()
    assert Resident(dataset, gpu).of(other) is other
    there = DeviceMolecules(host, gpu)
    assert Resident(SparseDataset(there), gpu).of(there) is there


@pytest.mark.parametrize(
    'labels', [[numpy.zeros(1 + i % 3) for i in range(8)], list('abcdefgh')], ids=['', 'names']
)
def test_labels_of_several_shapes_have_no_copy(gpu, labels):
    """A data set whose labels have several shapes is sent from the host, batch by batch."""
    sparse = to_sparse([(*e[:2], label) for e, label in zip(molecules(8), labels, strict=True)])
    assert Resident(sparse, gpu).of(sparse.molecules) is sparse.molecules
    assert sparse.molecules.atoms.flags.writeable


def test_no_copy_on_the_host(dataset):
    host = dataset.molecules
    assert Resident(dataset, chainer.backend.CpuDevice()).of(host) is host
    assert host.atoms.flags.writeable


def test_arrays_that_change(gpu, dataset):
    host = dataset.molecules
    copy_there = Resident(dataset, gpu)
    for array in (host.atoms, host.columns, host.labels[0]):
        with pytest.raises(ValueError, match='read-only'):
            array[0] = 1
    assert copy_there.of(host) is not host
    host.labels[0] = host.labels[0].copy()
    assert copy_there.of(host) is host
    assert Resident(dataset, gpu).of(host) is not host


@pytest.mark.parametrize('name', ['atoms', *INTEGERS, 'data'])
def test_a_copy_stands_for_no_array_that_was_replaced(gpu, name):
    host = to_sparse(molecules(3)).molecules
    resident = Resident(SparseDataset(host), gpu)
    assert resident.of(host) is not host
    setattr(host, name, getattr(host, name).copy())
    assert resident.of(host) is host


@pytest.mark.parametrize('n_molecules', [40, 1])
@pytest.mark.parametrize('layout', ['folded', 'packed'])
def test_training_is_the_same_to_the_bit(there, graphs, layout, n_molecules):
    """Indices and the copy on the GPU give the same bits as a list of examples from the host."""
    examples = to_sparse(molecules(n_molecules))
    converter = CSRConverter(layout, strip_padding=True)
    results = []
    for kind in (SerialIterator, OfUser):
        updater = make_updater(GraphUpdater, there, make_model(), examples, converter=converter)
        if kind is OfUser:
            numpy.random.seed(3)
            updater._iterators['main'] = OfUser(examples, 8)
            updater._driver.resident = types.SimpleNamespace(of=lambda molecules: molecules)
        reported = run(updater, 20)
        sources = {type(key[1]) for key in updater._driver.programs}
        assert sources == {type(None) if kind is OfUser else DeviceMolecules}
        results.append((reported, parameters(updater)))
    assert results[0][0] == results[1][0]
    assert_same_bits(results[0][1], results[1][1])


def test_the_only_molecule_is_copied_once(there, graphs, monkeypatch, noted):
    monkeypatch.setattr(device_dataset, 'gather_batch', lambda *_: pytest.fail('by one warp'))
    calls = noted(DeviceBatch, 'fill')
    examples = to_sparse(molecules(1))
    updater = make_updater(
        GraphUpdater, there, make_model(), examples, batch_size=1, converter=CSRConverter('packed')
    )
    run(updater, 6)
    (program,) = updater._driver.programs.values()
    assert program.is_captured and len(calls) == 1


def test_prediction_gathers_there_too(there, prediction_graphs, monkeypatch):
    made = []
    of = Resident.of

    def noted(self, molecules):
        made.append(of(self, molecules))
        return made[-1]

    monkeypatch.setattr(Resident, 'of', noted)
    model = make_model()
    model.to_device(there)
    data = to_sparse(molecules(40))
    values = [part.values for part in captured_predict(model, data, batch_size=8)]
    assert sum(map(len, values)) == 40 and {type(source) for source in made} == {DeviceMolecules}
    gc.collect()
    made.clear()
    assert not batches._copies


def test_two_data_sets_on_the_device(gpu, monkeypatch):
    """Each graph gathers from the data set that it was captured with; a third is on the host."""
    host_graphs.stand_in(monkeypatch)
    results, sources = [], []
    for are_there in (True, False):
        parts = [to_sparse(same_molecules(24)[i : i + BATCH]) for i in range(0, 24, BATCH)]
        if are_there:
            parts[:2] = [SparseDataset(DeviceMolecules(p.molecules, gpu)) for p in parts[:2]]
        updater = make_updater(GraphUpdater, gpu, small_model(), parts[0], optimizers.SGD(0.1))
        updater._driver.resident = types.SimpleNamespace(of=lambda molecules: molecules)
        iterators = [SerialIterator(part, BATCH, shuffle=False) for part in parts]
        for i in range(12):
            updater._iterators['main'] = iterators[i % 3]
            run(updater, 1)
        results.append(parameters(updater))
        sources.append([type(key[1]) for key in updater._driver.programs])
        assert all(program.is_captured for program in updater._driver.programs.values())
    assert_same_bits(*results)
    assert sources == [[DeviceMolecules] * 2 + [type(None)], [type(None)]]


@pytest.mark.gpu
def test_columns_of_nodes_with_a_data_set_on_the_device():
    device = chainer.get_device('@cupy:0')
    converter = CSRConverter(n_node_columns=1)
    dataset = DeviceDataset(same_molecules(), device)
    updater = make_updater(GraphUpdater, device, examples=dataset, converter=converter)
    with pytest.raises(ValueError, match='expected dense examples with n_node_columns = 1'):
        run(updater, 1)


def test_buffers_for_a_part_that_chainer_split_off():
    dataset = to_sparse(molecules(60))
    order = numpy.random.RandomState(0).permutation(60)
    first, _ = split_dataset(split_dataset(dataset, 60, order)[0], 40)
    parts = first, dataset[order[:40]]
    actual, expected = (batches.capacities(of, BATCH, 'packed')._levels for of in parts)
    assert actual == expected and len(actual) == 2
    dense = molecules(3)
    for other in (dataset[:0], split_dataset(dataset, 0)[0], dense, split_dataset(dense, 2)[0]):
        assert not batches.capacities(other, BATCH, 'packed')._levels


@pytest.mark.parametrize('layout, padded_to', [('packed', None), ('folded', None), ('folded', 30)])
def test_what_a_batch_of_a_device_dataset_sends(layout, padded_to):
    parsed = to_sparse(molecules(40)).molecules
    index = numpy.array([7, 3, 3])
    gathered = []
    vars(parsed).update(tables=None, gather=lambda *arguments: gathered.append(arguments))
    batch = batches.DeviceBatch(parsed, index, layout, padded_to)
    atoms, adj, _ = parsed.batch(index, layout, padded_to)
    as_host = batches.HostBatch(atoms, adj, parsed.labels)
    assert batch.form == as_host.form
    largest = needs(parsed.sizes, parsed.nnz, parsed.max_atom_id)
    largest = largest._replace(max_rows=largest.max_rows + (layout == 'folded'))
    assert batch.need == largest._replace(rows=as_host.need.rows, entries=as_host.need.entries)
    views = {name: numpy.zeros(*spec) for name, spec in batch.staged(None).items()}
    batch.write(views)
    assert views['index'].tolist() == index.tolist()
    if layout == 'folded':
        n = views['padded_to']
        assert n.tolist() == [padded_to or parsed.sizes[index].max()]
        ends = adj.row_offsets[1:] - 1
        assert (adj.row_weights[ends] == n - parsed.sizes[index]).all()
    batch.gather(views, 'buffers')
    assert gathered == [(views['index'], 'buffers', views.get('padded_to'))]


def test_symmetric_batches_have_a_form_of_their_own():
    upper = [(atoms, numpy.triu(adj), *rest) for atoms, adj, *rest in molecules(2)]
    parsed = to_sparse([*molecules(2), *upper]).molecules
    vars(parsed).update(tables=None)
    index = (0, 1), (2, 3), (0, 1)
    made = [batches.DeviceBatch(parsed, numpy.array(i), 'packed', None) for i in index]
    assert [batch.form.is_symmetric for batch in made] == [True, False, True]


@pytest.mark.parametrize('layout, more', [('packed', 0), ('folded', 1)])
def test_a_folded_molecule_has_a_row_more(layout, more):
    data_set = to_sparse(molecules(400))
    convert = CSRConverter(layout)
    found = batches.capacities(data_set, BATCH, layout)
    batch = batches.batch_of(batches.Conversion(data_set[:BATCH], convert, HOST))
    capacity = found.of(batch.need)
    assert capacity.max_rows == data_set.molecules.sizes.max() + more
    n_rows = BATCH * (data_set.molecules.sizes.mean() + more)
    assert max(n_rows, batch.need.rows) < capacity.rows < 1.5 * n_rows + STEP


def test_a_converter_of_a_user_that_leaves_out_a_column_of_atoms():
    dense = [(*example[:2], example[0], numpy.float32(1)) for example in molecules(6)]
    converter = CSRConverter(n_node_columns=1)

    def without(batch, device=None):
        atoms, adj, _, label = converter(batch, device)
        return atoms, adj, label

    batch = batches.batch_of(batches.Conversion(dense, without, HOST))
    assert isinstance(batch, batches.HostBatch)
    assert [array.shape for array in batch._rows[2]] == [(6,)]


SIX = [(numpy.full(n, 6, 'i'), numpy.ones((n, n), 'f'), numpy.ones(2, 'f')) for n in (3, 1) * 3]
A_TUPLE = (
    'converter: expected a tuple (atoms, BatchedCSR, label...), as chainer_bspmm.concat_mols makes '
    'it, got '
)
ROWS = 'converter: expected a row for each of %s in output %d, got shape %s'


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda atoms, adj, t: [atoms, adj, t], A_TUPLE + 'list'),
        (lambda atoms, adj, t: (adj,), A_TUPLE + '(BatchedCSR)'),
        (lambda atoms, adj, t: (atoms, t, adj), A_TUPLE + '(ndarray, ndarray, BatchedCSR)'),
        (
            lambda atoms, adj, t: (atoms, adj, t.tolist()),
            'converter: expected arrays on the host for device=None, got list',
        ),
        (
            lambda atoms, adj, t: (atoms, adj, t.astype(str)),
            'converter: expected numbers, got names (<U32); leave the column out',
        ),
        (lambda atoms, adj, t: (atoms[1:], adj, t), ROWS % ('12 atoms', 0, '(11,)')),
        (lambda atoms, adj, t: (numpy.append(atoms, 1), adj, t), ROWS % ('12 atoms', 0, '(13,)')),
        (lambda atoms, adj, t: (atoms, adj, t[:5]), ROWS % ('6 molecules', 2, '(5, 2)')),
        (lambda atoms, adj, t: (atoms, adj, t, t[[0] * 7]), ROWS % ('6 molecules', 3, '(7, 2)')),
        (lambda atoms, adj, t: (atoms, adj, atoms), ROWS % ('6 molecules', 2, '(12,)')),
        (
            lambda atoms, adj, t: (atoms, adj, t[0, 0]),
            'converter: expected arrays on the host for device=None, got float32',
        ),
        (lambda atoms, adj, t: (atoms, adj, numpy.array(1.0)), ROWS % ('6 molecules', 2, '()')),
    ],
)
def test_what_is_no_sparse_batch(change, message):
    def convert(batch, device=None):
        return change(*CSRConverter('packed')(batch, device))

    conversion = batches.Conversion(SIX, convert, HOST)
    with pytest.raises(batches.NoSparseBatch) as error:
        batches.batch_of(conversion)
    assert str(error.value) == message


class Example(NamedTuple):
    x: Any
    y: Any


def plain(value):
    """Return a converter's result as nested lists, dicts and numbers on the host."""
    if isinstance(value, BatchedCSR):
        return cuda.to_cpu(value.to_dense()).tolist()
    if isinstance(value, (chainer.Variable, *chainer.get_array_types())):
        return cuda.to_cpu(chainer.as_array(value)).tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return list(map(plain, value)) if isinstance(value, (tuple, list)) else value


RESULTS: dict[str, Callable] = {
    'a sparse batch': chainer_bspmm.concat_mols,
    'dense arrays': lambda batch, device: convert.concat_examples(batch, device),
    'a dict': lambda batch, device: {'x': convert.concat_examples(batch, device), 'name': 'one'},
    'a variable': lambda *given: chainer.Variable(convert.concat_examples(*given)[2]),
    'a named tuple': lambda *given: Example(convert.concat_examples(*given)[0], None),
    'numbers': lambda *given: [3, 0.5, numpy.float32(2), convert.concat_examples(*given)],
}


@pytest.mark.parametrize('name', RESULTS)
def test_a_converter_is_called_once_for_both_devices(device, name):
    """A batch that is converted on the host and sent equals one converted on the device."""
    devices = []

    def converter(batch, device=None):
        devices.append(device)
        return RESULTS[name](batch, device)

    conversion = batches.Conversion(same_molecules(3), converter, device)
    on_host = conversion.on_host()
    found = conversion.on_device()
    assert devices == [None] and conversion.on_host() is on_host
    expected = RESULTS[name](same_molecules(3), device)
    assert type(found) is type(expected) and plain(found) == plain(expected)
    assert devices_of(found) == devices_of(expected)


def devices_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [each for item in value for each in devices_of(item)]
    if isinstance(value, BatchedCSR):
        value = value.indptr
    is_array = isinstance(value, (chainer.Variable, *chainer.get_array_types()))
    return [backend.get_device_from_array(chainer.as_array(value))] if is_array else []


def test_without_a_device_batches_stay_on_the_host():
    conversion = batches.Conversion(same_molecules(3), CONVERTER, None)
    assert conversion.on_device() is conversion.on_host()


def test_only_a_converter_can_make_objects_of_a_user(device):
    devices = []

    def converter(batch, device=None):
        devices.append(device)
        return types.SimpleNamespace(batch=batch)

    conversion = batches.Conversion(same_molecules(3), converter, device)
    assert conversion.on_host() is not conversion.on_device()
    assert len(devices) == 2 and devices[0] is None and devices[1] is not None


def test_no_example_is_made_to_find_the_sizes_of_molecules():
    def fails(example):
        raise LookupError('an example was made')

    part = SubDataset(TransformDataset(molecules(6), fails), 1, 5)
    assert batches.molecules_of(part) is None
