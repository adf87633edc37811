"""Dense data sets are converted once; a later change is an error, or is noticed."""

import copy
import gc
import pickle

import numpy
import pytest

from chainer_bspmm import CSRConverter  # repairs Chainer before anything imports it
from chainer.datasets import ConcatenatedDataset, split_dataset_random, SubDataset, TransformDataset
from chainer.iterators import MultithreadIterator, SerialIterator
from chainer_chemistry.datasets import NumpyTupleDataset

from chainer_bspmm.dataset import sparse_form, to_sparse
from chainer_bspmm.dataset.selection import Selection
from chainer_bspmm.training.iterators import Examples
from chainer_bspmm.training.batches import molecules_of
from tests.support.data_sets import assert_same_batch
from tests.support.molecules import molecules

CONVERTER = CSRConverter()
SIZES = (3, 1, 7, 4, 4, 2, 9, 5, 3, 6, 1)


@pytest.fixture(autouse=True)
def locked():
    """Function that returns the locks that this test still holds."""
    before = set(sparse_form._locks)
    return lambda: set(sparse_form._locks) - before


def examples(kind='relations', n_relations=4, dtype='f'):
    """Return a list of (atoms, adjacency, label)."""
    rng = numpy.random.RandomState(1)
    made = molecules(SIZES, kind, n_relations)
    return [(atoms, adj.astype(dtype), rng.uniform(size=2).astype('f')) for atoms, adj, *_ in made]


def column(values):
    actual = numpy.empty(len(values), object)
    actual[:] = values
    return actual


def tuples(actual=None):
    """Return a NumpyTupleDataset in the format of Chainer Chemistry's parsers."""
    atoms, adj, labels = zip(*(actual or examples()))
    return NumpyTupleDataset(column(atoms), column(adj), numpy.array(labels))


def of_one_size(n=5, m=6):
    rng = numpy.random.RandomState(2)
    atoms = rng.randint(1, 9, (m, n)).astype('i')
    adj = rng.uniform(size=(m, n, n)) < 0.4
    return NumpyTupleDataset(atoms, adj.astype('f'), rng.uniform(size=(m, 1)).astype('f'))


KEPT = {
    'list': examples,
    'NumpyTupleDataset': tuples,
    'of one size': of_one_size,
    'SubDataset': lambda: split_dataset_random(tuples(), 8, seed=0)[0],
    'SubDataset of SubDataset': lambda: SubDataset(split_dataset_random(examples(), 8)[0], 1, 7),
    'ConcatenatedDataset': lambda: ConcatenatedDataset(tuples(), tuples(examples()[:4])),
    'values': lambda: tuples(examples('normalised', 1)),
    'float64': lambda: tuples(examples(dtype='d')),
    'labels of several shapes': lambda: [
        (*e[:2], numpy.arange(1.0 + i % 3)) for i, e in enumerate(examples())
    ],
    'columns that are lists': lambda: NumpyTupleDataset(*map(list, tuples()._datasets)),
    'unpickled': lambda: pickle.loads(pickle.dumps(tuples(), 4)),
}
if type(numpy.frombuffer(bytearray(1), 'b').base) is memoryview:  # false with NumPy 1.22
    # Protocol 5 is the default of Python 3.14.
    KEPT['unpickled, protocol 5'] = lambda: pickle.loads(pickle.dumps(tuples(), 5))


@pytest.mark.parametrize('converter', [CONVERTER, CSRConverter('packed'), CSRConverter('padded')])
@pytest.mark.parametrize('name', KEPT)
def test_the_same_batches(name, converter):
    dataset = KEPT[name]()
    taken = Examples()
    actual = []
    for take in (lambda iterator: taken.next(iterator, converter), SerialIterator.next):
        numpy.random.seed(0)
        iterator = SerialIterator(dataset, 3)
        steps = [(take(iterator), iterator.epoch_detail) for _ in range(12)]
        actual.append(steps)
    assert all(type(batch) is Selection for batch, _ in actual[0])
    for (mine, epoch), (other, expected) in zip(*actual):
        assert_same_batch(converter(mine), converter(other))
        assert epoch == expected
    taken.close()


def test_it_is_converted_once(noted):
    conversions = noted(sparse_form, 'to_sparse')
    train, valid = split_dataset_random(tuples(), 8)
    one, two = Examples(), Examples()
    iterators = SerialIterator(train, 3), SerialIterator(valid, 3)
    for _ in range(9):
        for taken, iterator in zip((one, two), iterators):
            taken.next(iterator, CONVERTER)
    assert len(conversions) == 1
    assert molecules_of(train)[0] is molecules_of(valid)[0]
    numpy.testing.assert_array_equal(molecules_of(train)[1], train._order[:8])
    one.close(), two.close()
    assert molecules_of(train) is None


def with_mapped_memory(tmp_path):
    dataset = of_one_size()
    numpy.save(tmp_path / 'adj.npy', dataset._datasets[1])
    mapped = numpy.load(tmp_path / 'adj.npy', mmap_mode='r+')
    return NumpyTupleDataset(dataset._datasets[0], mapped, dataset._datasets[2])


NOT_KEPT = {
    'a function': lambda path: TransformDataset(tuples(), lambda example: example),
    'a class of a user': lambda path: type('Own', (NumpyTupleDataset,), {})(*tuples()._datasets),
    'a column of another kind': lambda path: NumpyTupleDataset(*map(tuple, tuples()._datasets)),
    'joined lists': lambda path: ConcatenatedDataset(examples(), examples()),
    'lists': lambda path: [list(example) for example in examples()],
    'mapped memory': with_mapped_memory,
    'dtypes that differ': lambda path: examples() + examples(dtype='d'),
    'labels of atoms': lambda path: [(*e[:2], numpy.arange(len(e[0])), e[2]) for e in examples()],
    'labels of atoms, perhaps': lambda _: [(*e[:2], numpy.arange(5), e[2]) for e in of_one_size()],
    'a Python number': lambda path: [(*example[:2], 1.0) for example in examples()],
    'nothing': lambda path: [],
}


@pytest.mark.parametrize('name', NOT_KEPT)
def test_what_is_not_kept(name, tmp_path, locked):
    dataset = NOT_KEPT[name](tmp_path)
    assert type(sparse_form.open_form(dataset)) is type(None)
    assert not locked()
    if len(dataset):
        assert type(Examples().next(SerialIterator(dataset, 3), CONVERTER)) is list
        dataset[0][0].flags.writeable  # NOQA: B018


@pytest.mark.parametrize('kind', [MultithreadIterator, type('It', (SerialIterator,), {})])
def test_iterators_that_are_not_known(locked, kind):
    iterator = kind(tuples(), 3)
    assert type(Examples().next(iterator, CONVERTER)) is list
    iterator.finalize()
    assert not locked()


@pytest.mark.parametrize(
    'converter',
    [CSRConverter(n_node_columns=1), lambda batch, device=None: batch],
    ids=['of node columns', "a user's"],
)
def test_converters_that_need_dense_examples(locked, converter):
    assert type(Examples().next(SerialIterator(tuples(), 3), converter)) is list
    assert not locked()


@pytest.mark.parametrize('n_node_columns, suits', [(0, True), (1, False)])
def test_a_sparse_form_has_no_node_columns(n_node_columns, suits):
    converter = CSRConverter(n_node_columns=n_node_columns)
    assert sparse_form.suits(converter, to_sparse(tuples()).molecules) == suits


def test_padding_that_may_be_atoms(locked):
    """The data set stays dense, because a packed batch of some molecules is an error."""

    def padded(adj):
        return numpy.pad(adj, ((0, 0), (0, 1), (0, 1)))

    zero = numpy.int32(0)
    actual = [(numpy.append(atoms, zero), padded(adj), label) for atoms, adj, label in examples()]
    assert type(Examples().next(SerialIterator(actual, 3), CSRConverter('packed'))) is list
    assert not locked()


def opened(dataset):
    taken = Examples()
    assert type(taken.next(SerialIterator(dataset, 3, shuffle=False), CONVERTER)) is Selection
    return taken


@pytest.mark.parametrize('name', KEPT)
@pytest.mark.parametrize('place', [0, 1, 2])
def test_an_edit_in_place_is_an_error_until_the_end(name, place):
    dataset = KEPT[name]()
    taken = opened(dataset)
    with pytest.raises(ValueError, match='read-only'):
        dataset[0][place][...] = 1
    taken.close()
    if name == 'unpickled' and place < 2:
        return  # NumPy does not let such arrays become writable again
    dataset[0][place][...] = 1
    assert (dataset[0][place] == 1).all()
    again = opened(dataset)  # is converted again
    molecules, index = molecules_of(dataset)
    atoms, adj, labels = CONVERTER(Selection(molecules, index[:1]))
    if place == 0:
        assert (atoms[:-1] == 1).all()
    elif place == 1:
        assert adj.to_dense()[0][..., :-1, :-1].all()
    else:
        assert (labels == 1).all()
    again.close()


def test_the_owner_of_a_view_is_locked_too():
    """The owners of the arrays' memory are locked, too, and columns of arrays."""
    owner = numpy.random.RandomState(0).randint(1, 9, (6, 5)).astype('i')
    _, adj, labels = of_one_size()._datasets
    actual = list(zip(owner, adj, labels))
    dataset = tuples()
    taken, other = opened(actual), opened(dataset)
    column = dataset._datasets[1]
    for array, item in ((owner, 0), (adj, 0), (labels, 0), (column, column[1])):
        with pytest.raises(ValueError, match='read-only'):
            array[0] = item
    taken.close()
    other.close()
    owner[0] = adj[0] = labels[0] = 1
    actual[1][0][...] = 2
    assert (owner[1] == 2).all()


@pytest.mark.parametrize('base', [False, True])
def test_a_list_whose_items_are_replaced(base):
    actual = examples()
    order = numpy.arange(len(actual))[::-1]
    dataset = SubDataset(actual, 0, len(actual), order) if base else actual
    taken = Examples()
    iterator = SerialIterator(dataset, len(actual), shuffle=False)
    assert type(taken.next(iterator, CONVERTER)) is Selection
    actual[4] = (actual[4][0] + 1, *actual[4][1:])
    assert taken.next(iterator, CONVERTER)[-5 if base else 4] is actual[4]
    actual[3][0][...] = 1  # is no longer locked


REPLACE = {
    'list': lambda actual: actual.append(actual[0]),
    'columns that are lists': lambda of: of._datasets[1].append(of._datasets[1].pop().copy()),
    'NumpyTupleDataset': lambda of: setattr(of, '_datasets', tuples(examples()[::-1])._datasets),
}


@pytest.mark.parametrize('name', REPLACE)
def test_what_is_replaced_between_batches(name):
    dataset = KEPT[name]()
    taken = Examples()
    iterator = SerialIterator(dataset, len(dataset), shuffle=False)
    assert type(taken.next(iterator, CONVERTER)) is Selection
    REPLACE[name](dataset)
    assert type(taken.next(iterator, CONVERTER)) is list


def test_an_item_that_is_replaced_long_before_it_is_read():
    actual = examples()
    taken = Examples()
    iterator = SerialIterator(actual, 2, shuffle=False)
    assert type(taken.next(iterator, CONVERTER)) is Selection
    actual[8] = actual[9]
    for is_known, kind in ((False, Selection), (True, list), (True, list)):
        assert type(taken.next(iterator, CONVERTER, True, is_known)) is kind


def test_items_that_a_sampler_replaces():
    actual = examples()

    def sampled(order, position):
        actual[5] = (*actual[5],)
        return numpy.arange(len(order))

    taken = Examples()
    iterator = SerialIterator(actual, 4, shuffle=None, order_sampler=sampled)
    kinds = [type(taken.next(iterator, CONVERTER, True, True)) for _ in range(5)]
    assert kinds == [Selection] * 3 + [list] * 2


def test_another_data_set_of_the_iterator(locked):
    taken = Examples()
    iterator = SerialIterator(tuples(), 3, shuffle=False)
    taken.next(iterator, CONVERTER)
    iterator.dataset = tuples(examples()[::-1])
    actual = taken.next(iterator, CONVERTER)
    assert type(actual) is Selection
    assert_same_batch(CONVERTER(actual), CONVERTER([iterator.dataset[i] for i in (3, 4, 5)]))
    taken.close()
    assert not locked()


def test_arrays_that_are_shared_or_were_read_only():
    actual = examples()
    actual[0][0].flags.writeable = False
    one = opened(actual)
    two = opened(actual[:5])
    one.close()
    with pytest.raises(ValueError, match='read-only'):
        actual[1][1][...] = 0
    actual[8][1][...] = 0
    two.close()
    actual[1][1][...] = 0
    assert not actual[0][0].flags.writeable


def test_views_of_one_array_in_two_trainings(locked):
    labels = numpy.random.RandomState(0).uniform(size=(len(SIZES), 2)).astype('f')
    actual = [(*example[:2], label) for example, label in zip(examples(), labels)]
    one = opened(actual[:5])
    two = opened(actual[5:])
    one.close()
    with pytest.raises(ValueError, match='read-only'):
        actual[0][2][...] = 0  # the other training still locks the memory of this view
    two.close()
    for example in actual:
        example[2][...] = 1
    assert not locked() and not sparse_form._waiting


def test_a_copy_has_its_own_form(locked):
    taken = opened(examples())
    other = copy.deepcopy(taken)
    del other
    taken.close()
    assert not locked()


def test_an_interrupt_while_it_is_converted(monkeypatch, locked):
    def interrupted(dataset):
        raise KeyboardInterrupt

    monkeypatch.setattr(sparse_form, 'to_sparse', interrupted)
    with pytest.raises(KeyboardInterrupt):
        Examples().next(SerialIterator(examples(), 3), CONVERTER)
    assert not locked()
    monkeypatch.setattr(sparse_form, 'to_sparse', lambda dataset: bytearray(2**62))
    assert type(Examples().next(SerialIterator(examples(), 3), CONVERTER)) is list


def test_data_sets_that_take_turns(locked):
    """Alternating data sets are converted as a whole a few times, and then batch by batch."""
    taken = Examples()
    iterators = [SerialIterator(examples(), 3) for _ in range(2)]
    kinds = [type(taken.next(iterators[i % 2], CONVERTER)) for i in range(9)]
    assert kinds == [Selection] * 4 + [list] * 5
    taken.close()
    assert not locked()


@pytest.mark.parametrize('make', [examples, lambda: SubDataset(examples(), 2, 9)])
@pytest.mark.parametrize('number', [-1, 99])
def test_samplers_that_count_from_the_end(make, number):
    """Chainer passes a sampled index to the data set: -1 is the last example, 99 an IndexError."""
    found = make()

    def sampled(order, position):
        return numpy.arange(len(order))[::-1] + number - len(order) + 1

    iterator = SerialIterator(found, 3, shuffle=None, order_sampler=sampled)
    if number < 0:
        batch = Examples().next(iterator, CONVERTER)
        assert type(batch) is list and batch[0] is found[-1]
    else:
        with pytest.raises(IndexError):
            Examples().next(iterator, CONVERTER)

    def sampler(order, position):
        return list(range(len(order)))

    iterator = SerialIterator(found, 3, shuffle=None, order_sampler=sampler)
    assert type(Examples().next(iterator, CONVERTER)) is Selection
    split = SubDataset(found, 0, 4, numpy.arange(len(found)) - 2)  # molecules -2, -1, 0, 1
    batch = Examples().next(SerialIterator(split, 3, shuffle=False), CONVERTER)
    assert type(batch) is list and all(e is found[i] for i, e in zip((-2, -1, 0), batch))


def test_a_selection_is_a_sequence():
    taken = opened(tuples())
    actual = taken.next(SerialIterator(tuples(), 3, shuffle=False), CONVERTER)
    assert [len(example) for example in actual] == [3] * 3
    numpy.testing.assert_array_equal(actual[0][0], examples()[0][0])
    taken.close()


def test_what_nobody_closes_ends_with_its_owner(locked):
    actual = examples()
    taken = opened(actual)
    del taken
    gc.collect()
    actual[0][1][...] = 0
    assert not locked()


@pytest.mark.parametrize('strip_padding', [None, False, True])
@pytest.mark.parametrize('layout', ['folded', 'padded', 'packed', 9])
@pytest.mark.parametrize('last', [(6, True), (0, False), (0, True)], ids=str)
def test_a_form_that_suits_a_converter(layout, strip_padding, last):
    """A sparse form makes the same batches as the dense examples, where it suits."""
    atom, is_bonded = last  # an atom, padding, or a bonded atom of id 0
    dense = examples(n_relations=1)
    for atoms, adj, _ in dense:
        atoms[-1], adj[-1], adj[:, -1] = atom, is_bonded, is_bonded
    sizes = {'padded_to': 9} if layout == 9 else {'layout': layout}
    converter = CSRConverter(strip_padding=strip_padding, **sizes)
    form = to_sparse(dense)
    may_lose = strip_padding is None and layout in ('packed', 9)
    suits = last != (0, False) or not (may_lose or strip_padding is False)
    assert sparse_form.suits(converter, form.molecules) == suits
    if suits:
        assert_same_batch(converter(form[:]), converter(dense))


@pytest.mark.parametrize('how', ['bytearray', 'memoryview of it', 'memoryview of an array'])
def test_memory_that_somebody_else_can_write_to(how, locked):
    """Arrays over such memory cannot be locked, so they are converted batch by batch."""
    memory = bytearray(4 * sum(SIZES))
    if how == 'memoryview of an array':
        flat = numpy.asarray(memoryview(numpy.frombuffer(memory, 'i')))
    else:
        flat = numpy.frombuffer(memoryview(memory) if how == 'memoryview of it' else memory, 'i')
    flat[:] = 6
    atoms = numpy.split(flat, numpy.cumsum(SIZES)[:-1])
    dataset = [(mine, *example[1:]) for mine, example in zip(atoms, examples())]
    assert type(Examples().next(SerialIterator(dataset, 3), CONVERTER)) is list
    assert not locked()
    memory[0] = 7  # this memory is not locked


def test_sparse_examples_in_lists_that_are_split():
    for make in (list, tuple):
        found = molecules_of(SubDataset(make(to_sparse(examples())), 2, 9))
        assert found is not None and found[1].tolist() == list(range(2, 9))
    assert molecules_of(SubDataset(to_sparse(examples())[:0], 0, 0, [])) is None
