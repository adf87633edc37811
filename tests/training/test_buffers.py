"""Buffers of a step: their sizes, the places of arrays in them, and what waits for what."""

import contextlib
import ctypes
import types
from unittest import mock

import numpy
import pytest

from chainer_bspmm import CSRConverter
from chainer_bspmm.dataset import batch_form, to_sparse
from chainer_bspmm.training import batches, buffers
from chainer_bspmm.dataset.batch_form import Capacity, needs
from chainer_bspmm.training.sizes import Capacities, STEP
from chainer_bspmm.training.programs import Programs
from tests.support.training import BATCH, molecules as examples


def holds(capacity, need):
    return all(has >= asked for has, asked in zip(capacity, need))


@pytest.fixture
def sizes():
    return numpy.random.RandomState(0).randint(1, 40, 2000)


def test_needs():
    assert needs(numpy.array([3, 1]), numpy.array([4, 0]), 9) == Capacity(4, 4, 3, 4, 9)
    assert needs(numpy.zeros(1, int), numpy.zeros(1, int), None) == Capacity(0, 0, 0, 0, -1)


def test_two_sizes_hold_the_batches_of_a_data_set(sizes):
    capacities = Capacities(64, sizes, 2 * sizes, needs(sizes, 2 * sizes, 30))
    rng = numpy.random.RandomState(1)
    taken = []
    for _ in range(1000):
        batch = rng.choice(sizes, 64, replace=False)
        need = needs(batch, 2 * batch, 30)
        taken.append(capacities.of(need))
        assert holds(taken[-1], need)
        assert taken[-1].rows > need.rows and taken[-1].entries > need.entries
    small, large = sorted(set(taken))
    # Rounding up to a multiple makes the share of the smaller one larger than 0.84.
    assert 0.8 < taken.count(small) / 1000 < 0.97
    assert large.rows < 1.3 * 64 * sizes.mean()
    assert small.max_rows == large.max_rows == sizes.max()


def test_sizes_at_the_edges():
    """None is larger than the largest batch; all of a data set fit, with a spare row."""
    sizes = numpy.array([1] * 99 + [STEP])
    capacities = Capacities(2, sizes, sizes, needs(sizes, sizes, None))
    assert capacities.of(Capacity(STEP + 1, STEP + 1, STEP, STEP, -1)).rows == 2 * STEP

    sizes = numpy.array([STEP // 2, 3 * STEP // 2])
    capacities = Capacities(2, sizes, sizes, needs(sizes, sizes, None))
    known = {capacities.of(needs(sizes[:1], sizes[:1], None)) for _ in range(2)}
    assert {capacities.of(needs(sizes, sizes, None))} == known
    assert known.pop().rows == 3 * STEP
    empty = numpy.zeros(0, int)
    capacities = Capacities(8, empty, empty, needs(empty, empty, 0))
    assert capacities.of(Capacity(0, 0, 0, 0, 0)).rows == STEP


@pytest.mark.parametrize('known', [False, True])
def test_larger_batches_add_sizes(sizes, known):
    capacities = Capacities(8, *(sizes, sizes, needs(sizes, sizes, 5)) if known else ())
    first = Capacity(5000, 100, 300, 20, 7)
    added = capacities.of(first)
    assert holds(added, first) and added.rows % STEP == added.entries % STEP == 0
    assert added.rows <= 1.2 * first.rows + STEP
    assert capacities.of(first._replace(rows=5400)) is added  # a tenth more than it was made for
    larger = capacities.of(first._replace(entries=90000))
    assert holds(larger, added) and larger is not added
    assert capacities.of(first) is added


def test_a_size_that_is_full_has_no_spare_row(sizes):
    capacities = Capacities(64, sizes, 2 * sizes, needs(sizes, 2 * sizes, 30))
    batch = sizes[:64]
    need = needs(batch, 2 * batch, 30)
    small = capacities.of(need)
    for name in ('rows', 'entries'):
        full = need._replace(**{name: getattr(small, name)})
        assert getattr(capacities.of(full), name) > getattr(small, name)


ARRAYS = {'counter': ((1,), 'u8'), 'bytes': ((3,), 'b'), 'none': ((0, 4), 'f'), 'half': ((5,), 'e')}
ARRAYS.update(matrix=((2, 3), 'd'), scalar=((), 'i'))


class Pinned(bytearray):
    """Stand-in for the result of ``cupy.cuda.alloc_pinned_memory``."""

    @property
    def ptr(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


@pytest.fixture(params=[0, buffers.FEW_BYTES], ids=['copy', 'kernel'])
def staged(request, monkeypatch):
    """A `Staging` between two places on the host, and the list of what it does there."""
    calls = []

    class Event:
        def __init__(self, disable_timing):
            assert disable_timing

        def record(self, stream):
            calls.append(('record', self))

        def synchronize(self):
            calls.append(('wait', self))

    class Buffer(numpy.ndarray):
        @property
        def data(self):
            return types.SimpleNamespace(copy_from_host_async=self.copy, device_id=0)

        def copy(self, source, n_bytes):
            self[:n_bytes] = numpy.frombuffer(ctypes.string_at(source, n_bytes), numpy.uint8)
            calls.append(('copy', None))

        def get(self):
            return self

    class Device(contextlib.nullcontext):
        def synchronize(self):
            calls.append(('synchronize', None))

    runtime = types.SimpleNamespace(getDevice=lambda: 0, CUDARuntimeError=RuntimeError)
    place = types.SimpleNamespace(alloc_pinned_memory=Pinned, Event=Event, runtime=runtime)
    cupy = types.SimpleNamespace(zeros=lambda *given: numpy.zeros(*given).view(Buffer), cuda=place)
    monkeypatch.setattr(buffers, 'cuda', types.SimpleNamespace(cupy=cupy))
    monkeypatch.setattr(buffers, 'FEW_BYTES', request.param)
    monkeypatch.setattr(buffers.kernels, 'load', lambda *_: kernel)

    def kernel(grid, block, arguments, shared_bytes):
        slots, to, n_quads, n_slots, position = arguments
        assert grid == (1, 1, 1) and block[0] <= 1024 and shared_bytes == 0
        n_bytes = buffers.plans.VECTOR_BYTES * int(n_quads)
        to.copy(int(slots) + int(position[0] % n_slots) * n_bytes, n_bytes)
        position += 1

    made = buffers.Staging(ARRAYS, types.SimpleNamespace(device=Device()))
    assert calls.pop() == ('synchronize', None) and not calls  # its memory is ready on any stream
    return made, calls


def test_arrays_arrive(staged):
    """And again, where that is asked for."""
    staged, _ = staged
    for number in range(1, 2 * buffers.N_SLOTS + 2):
        for i, array in enumerate(staged.fill().values()):
            array[...] = number + i
        for is_again in (False, True):
            if is_again:
                staged.again()
            staged.send('the current one')
            for i, (name, (shape, dtype)) in enumerate(ARRAYS.items()):
                array = staged.device[name]
                assert array.shape == shape and array.dtype == dtype
                assert (array == number + i).all()
                assert array.ctypes.data % array.itemsize == 0


def test_the_host_waits_for_the_last_copy_from_a_group_of_slots(staged):
    staged, calls = staged
    n = buffers.N_SLOTS
    slots = []
    for _ in range(4 * n):
        slots.append(id(staged.fill()))
        staged.send('the current one')
    assert slots[: 2 * n] == slots[2 * n :] and len(set(slots)) == 2 * n  # in turn
    assert [call for call, _ in calls] == ['wait', *['copy'] * n, 'record'] * 4
    waited, recorded = ([event for call, event in calls if call == k] for k in ('wait', 'record'))
    assert waited == recorded and waited[:2] == waited[2:] and waited[0] is not waited[1]


def test_memory_is_given_back_when_all_copies_are_done(staged):
    staged, calls = staged
    another = buffers.Staging(ARRAYS, types.SimpleNamespace(device=staged._device))
    del calls[:], another
    assert calls == [('synchronize', None)]


@pytest.mark.parametrize('was_copied', [False, True])
def test_after_an_error_the_host_asks_which_slot_is_next(staged, was_copied):
    """Between the two calls a signal, for example, may raise."""
    staged, calls = staged
    for number in range(1, 5 * buffers.N_SLOTS):
        for array in staged.fill().values():
            array[...] = number
        if number == 3:
            if was_copied:
                staged.copy()
            continue
        staged.send('the current one')
        assert all((array == number).all() for array in staged.device.values())
    assert [call for call, _ in calls].count('synchronize') == 1


def make_inputs(calls, is_few):
    """Return `Inputs` that write down what they do, and a batch for them."""

    class Recording(buffers.Staging):
        is_kernel = is_few

        def __init__(self, arrays, device):
            self.device = {name: numpy.zeros(*spec) for name, spec in arrays.items()}

        def fill(self):
            calls.append('fill')
            return self.device

        def copy(self):
            calls.append('copy')

        def copied(self, stream):
            calls.append('copied')

    batch = types.SimpleNamespace(
        form=batch_form.Form(
            n_graphs=1,
            n_relations=1,
            is_symmetric=True,
            atoms=(numpy.dtype('i'), ()),
            data=None,
            labels=(),
            longest=128,
        ),
        gather=None,
        staged=lambda capacity: batch_form.batch_arrays(batch.form, capacity),
        write=lambda views: calls.append('write'),
    )
    capturer = types.SimpleNamespace(join=lambda: calls.append('join'))
    with mock.patch.object(buffers, 'Staging', Recording):
        driver = types.SimpleNamespace(capturer=capturer, blas=None, seed=0, device=None)
        return buffers.Inputs(driver, batch, Capacity(64, 64, 3, 4, 9), 2), batch


def test_a_batch_is_sent_after_the_last_step():
    """Which may run on another stream, and read what the copy would overwrite."""
    calls = []
    inputs, batch = make_inputs(calls, True)
    inputs.send(batch, 5, [1.5, 2.5])
    assert calls == ['fill', 'write', 'join', 'copy', 'copied']
    assert inputs.step.counter.tolist() == [5] and inputs.numbers.tolist() == [1.5, 2.5]


@pytest.mark.parametrize('is_few', [False, True])
def test_a_graph_fetches_few_bytes(is_few):
    calls = []
    inputs, batch = make_inputs(calls, is_few)
    inputs.fetch()
    assert calls == ['copy'] * is_few  # captured
    del calls[:]
    inputs.send(batch, 5, [1.5, 2.5], by_graph=True)
    inputs.fetched('the stream')
    assert calls == ['fill', 'write', *([] if is_few else ['join', 'copy']), 'copied']


@pytest.mark.parametrize('layout, padded_to', [('packed', None), ('folded', None), ('folded', 30)])
def test_what_a_batch_of_a_device_dataset_sends(layout, padded_to):
    molecules = to_sparse(examples(40)).molecules
    index = numpy.array([7, 3, 3])
    gathered = []
    vars(molecules).update(tables=None, gather=lambda *arguments: gathered.append(arguments))
    batch = batches.DeviceBatch(molecules, index, layout, padded_to)
    atoms, adj, _ = molecules.batch(index, layout, padded_to)
    as_host = batches.HostBatch(atoms, adj, molecules.labels)
    assert batch.form == as_host.form
    largest = needs(molecules.sizes, molecules.nnz, molecules.max_atom_id)
    largest = largest._replace(max_rows=largest.max_rows + (layout == 'folded'))
    assert batch.need == largest._replace(rows=as_host.need.rows, entries=as_host.need.entries)
    views = {name: numpy.zeros(*spec) for name, spec in batch.staged(None).items()}
    batch.write(views)
    assert views['index'].tolist() == index.tolist()
    if layout == 'folded':
        n = views['padded_to']
        assert n.tolist() == [padded_to or molecules.sizes[index].max()]
        ends = adj.row_offsets[1:] - 1
        assert (adj.row_weights[ends] == n - molecules.sizes[index]).all()
    batch.gather(views, 'buffers')
    assert gathered == [(views['index'], 'buffers', views.get('padded_to'))]


def test_symmetric_batches_have_a_form_of_their_own():
    upper = [(atoms, numpy.triu(adj), *rest) for atoms, adj, *rest in examples(2)]
    molecules = to_sparse([*examples(2), *upper]).molecules
    vars(molecules).update(tables=None)
    index = (0, 1), (2, 3), (0, 1)
    made = [batches.DeviceBatch(molecules, numpy.array(i), 'packed', None) for i in index]
    assert [batch.form.is_symmetric for batch in made] == [True, False, True]


@pytest.mark.parametrize('layout, more', [('packed', 0), ('folded', 1)])
def test_a_folded_molecule_has_a_row_more(layout, more):
    data_set = to_sparse(examples(400))
    convert = CSRConverter(layout)
    found = batches.capacities(data_set, BATCH, layout)
    batch = batches.batch_of(data_set[:BATCH], convert, None)
    capacity = found.of(batch.need)
    assert capacity.max_rows == data_set.molecules.sizes.max() + more
    n_rows = BATCH * (data_set.molecules.sizes.mean() + more)
    assert max(n_rows, batch.need.rows) < capacity.rows < 1.5 * n_rows + STEP


def test_layouts_have_sizes_of_their_own():
    """A padded batch has more rows; packed ones after it do not get them as well."""
    data_set = to_sparse(examples(400))
    programs = Programs('step')
    rows = {}
    for layout in ('padded', 'folded', 'packed'):
        batch = batches.batch_of(data_set[:100], CSRConverter(layout), None)
        rows[layout] = programs.capacity(batch.form, batch.need, data_set).rows
        assert rows[layout] == batches.capacities(data_set, 100, layout).of(batch.need).rows
    assert rows['padded'] > rows['folded'] > rows['packed']


def test_a_converter_of_a_user_that_leaves_out_a_column_of_atoms():
    dense = [(*example[:2], example[0], numpy.float32(1)) for example in examples(6)]
    converter = CSRConverter(n_node_columns=1)

    def without(batch, device=None):
        atoms, adj, _, label = converter(batch, device)
        return atoms, adj, label

    batch = batches.batch_of(dense, without, None)
    assert isinstance(batch, batches.HostBatch)
    assert [array.shape for array in batch._rows[2]] == [(6,)]
