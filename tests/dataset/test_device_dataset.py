"""`DeviceDataset`: a SparseDataset whose batches are gathered on the GPU."""

import pickle
import re

import numpy
import pytest

import chainer
from chainer.backends import cuda

from chainer_bspmm import concat_mols, CSRConverter
from chainer_bspmm.dataset import device_dataset, DeviceDataset, SparseDataset, to_sparse
from chainer_bspmm.dataset.device_dataset import DeviceMolecules
from chainer_bspmm.dataset.molecules import Molecules
from tests.support.data_sets import assert_same_batch, LABELS, molecule_set, molecules

INDEX = (3, 0, 6, 5, 5, 2, 1, 7, 0)
ON_HOST = chainer.get_device('@numpy')
# The molecules differ in size and have padding, so strip_padding has to say that it is padding.
PACKED = CSRConverter('packed', strip_padding=True)
CONVERTERS = (
    concat_mols,
    PACKED,
    CSRConverter('padded'),
    CSRConverter(padded_to=6, strip_padding=True),
    CSRConverter(padded_to=99),
    CSRConverter('packed', strip_padding=False),
)


def on_host(batch):
    atoms, adj, *labels = batch
    return (cuda.to_cpu(atoms), adj.to_device(-1), *map(cuda.to_cpu, labels))


@pytest.fixture
def resident():
    """DeviceMolecules on the host, for tests without the kernel."""
    return DeviceMolecules(molecule_set(labels='five'), ON_HOST)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(cuda, 'available', False)
    message = (
        '^device: expected a GPU that CuPy finds, got none; '
        'without one, keep using the SparseDataset$'
    )
    with pytest.raises(RuntimeError, match=message):
        DeviceDataset(molecules(), 0)


def too_large(device, most, needed):
    """Return a pattern that matches the whole error."""
    return (
        '^dataset: expected at most max_bytes = %d bytes for %s, got %d; keep using the '
        'SparseDataset, whose batches are sent one by one$' % (most, device, needed)
    )


def test_too_large(resident):
    needed = resident.device_nbytes
    assert DeviceMolecules(resident.host, ON_HOST, needed).device_nbytes == needed
    message = too_large('@numpy', needed - 1, needed)
    with pytest.raises(ValueError, match=message):
        DeviceMolecules(resident.host, ON_HOST, needed - 1)


def test_a_batch_of_too_many_columns(resident):
    resident.n_relations = 2**30
    n_columns = resident.sizes[:2].sum() * 2**30
    message = 'nodes times relations: expected at most 2**31 - 1 = 2147483647 in one batch, got %d'
    with pytest.raises(ValueError, match='^%s$' % re.escape(message % n_columns)):
        resident.batch(numpy.arange(2), 'packed')


def test_what_the_host_knows(resident):
    host = resident.host
    for name in ('sizes', 'nnz', 'symmetric', 'full_sizes'):
        numpy.testing.assert_array_equal(getattr(resident, name), getattr(host, name))
    assert resident.max_atom_id == host.atoms.max()
    for i, (start, size) in enumerate(zip(host.starts, host.sizes)):
        assert resident._max_ids[i] == host.atoms[start : start + size].max(initial=0)
    assert DeviceMolecules(molecule_set(atoms='f'), ON_HOST).max_atom_id is None
    sent = [*resident._source[:6], *resident._source.labels]
    assert resident.device_nbytes == sum(array.nbytes for array in sent)


def test_examples_are_those_of_the_host(resident):
    dataset, expected = SparseDataset(resident), SparseDataset(resident.host)
    for i in (0, 2, 5):
        for column in (0, 2, 3):
            numpy.testing.assert_array_equal(dataset[i][column], expected[i][column])
        numpy.testing.assert_array_equal(dataset[i][1].indptr, expected[i][1].indptr)


def test_pickles_are_those_of_the_host(resident):
    dataset = SparseDataset(resident)
    for part in (dataset, dataset[2:7], dataset[3]):
        again = pickle.loads(pickle.dumps(part))
        assert type(again.molecules) is Molecules
    again = pickle.loads(pickle.dumps(dataset))
    assert_same_batch(concat_mols(again), concat_mols(SparseDataset(resident.host)))


@pytest.mark.parametrize(
    'index, first', [([0, 8], 8), ([0, 9], 9), ([0, -1, 9], -1), ([-2, 7], -2)]
)
def test_bad_index(resident, index, first):
    message = '^index: expected at least 0 and less than 8, the number of molecules, got %d$'
    with pytest.raises(IndexError, match=message % first):
        resident.batch(numpy.array(index), 'packed')


def test_good_index(resident):
    checked = resident.check(numpy.array(INDEX))
    assert checked.dtype == numpy.int32 and checked.tolist() == list(INDEX)


def test_other_devices_are_served_from_the_host(resident):
    assert resident.near(ON_HOST) is resident
    resident.device = object()  # is none of the devices below
    dataset, expected = SparseDataset(resident), SparseDataset(resident.host)
    for device in (None, -1, '@numpy'):
        for converter in CONVERTERS:
            assert_same_batch(converter(dataset, device), converter(expected))
    resident.device = ON_HOST
    for converter in CSRConverter('padded'), CSRConverter('packed', strip_padding=False):
        actual = converter(dataset[list(INDEX)])
        assert_same_batch(actual, converter(expected[list(INDEX)]))


@pytest.mark.parametrize(
    'options, on_device',
    [
        ({'layout': 'packed', 'strip_padding': True}, True),
        ({'layout': 'packed', 'strip_padding': False}, False),
        ({'strip_padding': False}, True),  # a folded batch has the same numbers either way
        ({'padded_to': 6, 'strip_padding': False}, False),
        ({'layout': 'padded'}, False),
        ({}, True),
    ],
)
def test_rows_for_padding_are_gathered_on_the_host(resident, options, on_device):
    molecules, index = CSRConverter(**options).locate(SparseDataset(resident)[[2, 1]])
    assert molecules is (resident if on_device else resident.host) and index.tolist() == [2, 1]
    assert CSRConverter(**options).locate([(None, None)]) is None


@pytest.mark.parametrize('n_relations', [1, 3])
def test_the_only_molecule_is_not_gathered(device, monkeypatch, n_relations):
    if device.xp is numpy:
        monkeypatch.setattr(cuda, 'cupy', numpy, raising=False)
    monkeypatch.setattr(device_dataset, 'gather_batch', lambda *_: pytest.fail('gathered'))
    host = molecule_set(n_relations=n_relations)
    host = host.take(numpy.array([host.nnz.argmax()]))
    only = DeviceMolecules(host, device)
    index = numpy.zeros(1, 'l')
    atoms, adj, labels = only.batch(index, 'packed')
    expected = host.batch(index, 'packed')
    assert_same_batch(on_host((atoms, adj, *labels)), (*expected[:2], *expected[2]))
    assert not adj.has_spare
    others, again, _ = only.batch(index, 'packed')
    assert again.indices is adj.indices and others is not atoms  # atoms are copies
    for other, error in ((numpy.zeros(2, 'l'), pytest.fail.Exception), (index + 1, IndexError)):
        with pytest.raises(error):
            only.batch(other, 'packed')


def test_load_gives_what_was_saved(resident, tmp_path):
    SparseDataset.save(str(tmp_path / 'set.npz'), SparseDataset(resident))
    again = DeviceDataset.load(str(tmp_path / 'set.npz'))  # the inherited method loads to the host
    assert type(again) is SparseDataset
    assert_same_batch(concat_mols(again), concat_mols(SparseDataset(resident.host)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    'options',
    [
        *({'data': data, 'n_relations': n} for data in (None, 'e', 'f', 'd') for n in (1, 4)),
        *({'labels': labels} for labels in LABELS),
        *({'atoms': atoms} for atoms in 'efd'),
        {'sizes': (3, 4, 3) * 3},
    ],
    ids=str,
)
def test_batches(options):
    host = SparseDataset(molecule_set(**options))
    dataset = DeviceDataset(host, 0)
    for index in (INDEX, (2,), (2, 6), (0,)):
        index = list(index)
        for converter in CONVERTERS:
            atoms, adj, *labels = batch = converter(dataset[index], 0)
            assert isinstance(atoms, cuda.ndarray) and isinstance(adj.indptr, cuda.ndarray)
            assert all(isinstance(label, cuda.ndarray) for label in labels)
            assert_same_batch(on_host(batch), converter(host[index]))
            for device in (None, -1):
                assert_same_batch(converter(dataset[index], device), converter(host[index]))


@pytest.mark.gpu
@pytest.mark.parametrize('n_graphs', [1, 1500])
def test_many_graphs(n_graphs):
    rng = numpy.random.RandomState(0)
    host = SparseDataset(molecule_set(rng.randint(0, 60, 400), n_relations=4))
    dataset = DeviceDataset(host, 0)
    index = rng.randint(0, 400, n_graphs)
    for converter in CONVERTERS:
        assert_same_batch(on_host(converter(dataset[index], 0)), converter(host[index]))


@pytest.mark.gpu
def test_limits_on_a_gpu():
    host = to_sparse(molecules())
    dataset = DeviceDataset(host, 0)
    assert isinstance(dataset, SparseDataset) and dataset.device.name == '@cupy:0'
    assert DeviceDataset(dataset, 0).molecules.host is host.molecules
    needed = dataset.molecules.device_nbytes
    assert len(DeviceDataset(host, 0, max_bytes=needed)) == 3
    with pytest.raises(ValueError, match=too_large('@cupy:0', needed - 1, needed)):
        DeviceDataset(host, 0, max_bytes=needed - 1)
    with pytest.raises(ValueError, match='^device: expected a GPU, got @numpy$'):
        DeviceDataset(host, -1)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_second_gpu():
    host = to_sparse(molecules())
    dataset = DeviceDataset(host, 1)
    for device in (1, 0):  # the current device is 0
        atoms, adj, label = concat_mols(dataset, device)
        assert atoms.device.id == adj.indptr.device.id == label.device.id == device
        assert_same_batch(on_host((atoms, adj, label)), concat_mols(host))
