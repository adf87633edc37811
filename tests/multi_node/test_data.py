"""Scattered sparse data sets, epochs of all ranks, and evaluations of all molecules."""

import contextlib
import re

from chainer_bspmm import CSRConverter  # repairs Chainer before anything imports it
import chainer
import numpy
import pytest
from chainer.iterators import SerialIterator
from chainer.training import extensions, StandardUpdater
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.dataset import SparseDataset, to_sparse
from chainer_bspmm.dataset.selection import Selection
from chainer_bspmm.dataset.sparse_dataset import selection
from chainer_bspmm.multi_node import faults, PartIterator
from chainer_bspmm.multi_node.epochs import _check_epochs
from chainer_bspmm.multi_node.evaluators import create_multi_node_evaluator
from chainer_bspmm.multi_node.scatter import _fingerprint
from chainer_bspmm.training.iterators import Examples
from tests.multi_node.models import communicator, Disagreement, raise_now, squared_error
from tests.support.ranks import needs_mpi, on_kept_ranks
from tests.support.training import MODELS, molecules

PACKED = CSRConverter('packed')


def data_set(n, **options):
    return to_sparse(molecules(n, **options))


def labels_of(dataset):
    return dataset.features[:, -1]


@contextlib.contextmanager
def disagreement(pattern):
    """Expect an error that rank 0 raises for all ranks; its message matches the pattern."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(faults, 'raise_on', raise_now)
        with pytest.raises(Disagreement) as caught:
            yield
    rank, message = caught.value.args
    assert rank == 0 and re.fullmatch(pattern, message), message


def scatter():
    import chainermn

    comm = communicator()
    whole = data_set(11)
    for root in (0, 1):
        mine = whole if comm.rank == root else None
        for options in ({}, {'shuffle': True, 'seed': 3}, {'shuffle': True}):
            for equal in (True, False):
                part = chainermn.scatter_dataset(
                    mine, comm, root, force_equal_length=equal, **options
                )
                assert type(part) is SparseDataset
                assert len(part.molecules) == len(part)  # other ranks' molecules are not here
                parts = comm.mpi_comm.allgather(part)
                assert [len(p) for p in parts] == ([4, 4, 4] if equal else [4, 4, 3])
                labels = numpy.concatenate([labels_of(p) for p in parts])
                found = {tuple(row) for row in labels.tolist()}
                assert found == {tuple(row) for row in labels_of(whole).tolist()}
                if options.get('seed') is not None and not equal:
                    order = numpy.random.RandomState(3).permutation(11)
                    numpy.testing.assert_array_equal(labels, labels_of(whole)[order])
                if not options and not equal:
                    numpy.testing.assert_array_equal(labels, labels_of(whole))
    # All ranks may pass the same data set, and parts of a sparse data set may be scattered.
    assert len(chainermn.scatter_dataset(whole, comm)) == 4
    half, _ = chainer.datasets.split_dataset_random(whole, 6, seed=0)
    part = chainermn.scatter_dataset(half, comm)
    assert type(part) is SparseDataset
    labels = numpy.concatenate(comm.mpi_comm.allgather(labels_of(part)))
    numpy.testing.assert_array_equal(labels, [half[i][2] for i in range(6)])
    # ChainerMN itself scatters dense data sets.
    dense = chainermn.scatter_dataset(molecules(6) if comm.rank == 0 else None, comm)
    assert type(dense) is chainer.datasets.SubDataset and len(dense) == 2


@needs_mpi
def test_scattered_parts_are_sparse():
    on_kept_ranks(3, scatter)


def test_scattering_has_the_defaults_of_chainermn():
    chainermn = pytest.importorskip('chainermn')
    scatter = chainermn.scatter_dataset
    theirs = scatter.__wrapped__
    assert scatter.__defaults__ == theirs.__defaults__
    assert scatter.__kwdefaults__ == theirs.__kwdefaults__


def scatter_two():
    import chainermn

    comm = communicator()
    pattern = (
        'dataset: expected the data set of rank 0, or None, got another one on rank 1 '
        r'\(8 molecules, checksum [0-9a-f]+ and 9 molecules, checksum [0-9a-f]+\): '
        'read it on one rank only'
    )
    with disagreement(pattern):
        chainermn.scatter_dataset(data_set(8 + comm.rank), comm)


@needs_mpi
def test_another_data_set_on_another_rank():
    on_kept_ranks(2, scatter_two)


def test_other_labels_are_another_data_set():
    one, other = data_set(5), data_set(5)
    assert _fingerprint(one) == _fingerprint(other)
    other.molecules.labels[0][3] += 1
    assert _fingerprint(one) != _fingerprint(other)


def test_selection_follows_sub_data_sets():
    whole = data_set(9)
    first, last = chainer.datasets.split_dataset(whole, 6)
    odd = chainer.datasets.SubDataset(first, 1, 4, [5, 3, 1, 0, 2, 4])
    numpy.testing.assert_array_equal(labels_of(selection(odd)), labels_of(whole)[[3, 1, 0]])
    numpy.testing.assert_array_equal(labels_of(selection(last)), labels_of(whole)[6:])
    assert selection(whole) is whole
    assert selection([1, 2]) is None
    assert selection(chainer.datasets.SubDataset([1, 2], 0, 1)) is None


class Comm:
    """Communicator of one rank; `sizes` has the size of each rank's part."""

    def __init__(self, sizes, rank, batch_size):
        self.rank = rank
        self.size = len(sizes)
        self.mpi_comm = self
        self.sizes = [(n, batch_size) for n in sizes]

    def allgather(self, mine):
        assert mine == self.sizes[self.rank]
        return self.sizes


@pytest.mark.parametrize(
    'sizes, batch_size', [([10, 7], 4), ([5, 5], 5), ([3, 4, 3], 1), ([7, 9, 8], 100)]
)
@pytest.mark.parametrize('repeat', [True, False])
def test_epochs_end_together(sizes, batch_size, repeat):
    if batch_size == 1:
        sizes = [4, 4, 4]
    counts = []
    for rank, n in enumerate(sizes):
        iterator = PartIterator(range(n), batch_size, Comm(sizes, rank, batch_size), repeat)
        for epoch in range(2):
            batches = [iterator.next()]
            while not iterator.is_new_epoch:
                batches.append(iterator.next())
            assert sorted(sum(batches, [])) == list(range(n))
            assert all(0 < len(batch) <= batch_size for batch in batches)
            lengths = [len(batch) for batch in batches]
            assert max(lengths) - min(lengths) <= 1
            counts.append(len(batches))
            assert iterator.epoch == epoch + 1
            if not repeat:
                pytest.raises(StopIteration, iterator.next)
                break
    assert len(set(counts)) == 1


@pytest.mark.parametrize('shuffle', [True, False])
def test_numbers_instead_of_examples(shuffle):
    """`GraphUpdater` takes indices of molecules from a `PartIterator`."""
    dataset = data_set(11)
    found = []
    for of in (Examples().next, lambda iterator, converter: iterator.next()):
        numpy.random.seed(0)
        iterator = PartIterator(dataset, 4, Comm([11], 0, 4), shuffle=shuffle)
        batches = [of(iterator, PACKED) for _ in range(7)]
        assert (type(batches[0]) is Selection) == (not found)
        assert (iterator.epoch, iterator.is_new_epoch) == (2, False)
        found.append([PACKED(batch)[2].tolist() for batch in batches])
    assert found[0] == found[1]
    assert [len(labels) for labels in found[0]] == [3, 4, 4, 3, 4, 4, 3]


def test_a_part_with_fewer_molecules_than_batches():
    message = (
        '^dataset: expected at least 3 molecules, one for each batch of an epoch, got 2 on rank 1$'
    )
    with pytest.raises(ValueError, match=message):
        PartIterator(range(3), 1, Comm([3, 2], 0, 1))


UNEQUAL_EPOCHS = (
    'iterator: expected epochs of one length on all ranks, got %s on rank 0 and %s on rank 1; '
    'use scatter_dataset(..., force_equal_length=True), or a chainer_bspmm.multi_node.PartIterator'
)


def updater_of_parts(make_iterator):
    """Return an updater for parts of four and three molecules."""
    import chainermn

    comm = communicator()
    whole = data_set(7) if comm.rank == 0 else None
    part = chainermn.scatter_dataset(whole, comm, force_equal_length=False)
    model = Regressor(MODELS['RSGCN'](), lossfun=lambda y, t: chainer.functions.mean(y))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)
    return StandardUpdater(make_iterator(part, comm), optimizer, converter=PACKED)


def epochs_of_parts():
    updater = updater_of_parts(lambda part, comm: PartIterator(part, 2, comm))
    trainer = chainer.training.Trainer(updater, (3, 'epoch'))
    trainer.run()
    assert communicator().mpi_comm.allgather(updater.iteration) == [6, 6]
    assert updater.epoch_detail == 3


@needs_mpi
def test_epochs_of_unequal_parts():
    on_kept_ranks(2, epochs_of_parts)


def epochs_of_another_iterator():
    updater = updater_of_parts(lambda part, comm: SerialIterator(part, 2))
    message = UNEQUAL_EPOCHS % ('2 batches', '3 examples in batches of 2')
    with disagreement(re.escape(message)):
        chainer.training.Trainer(updater, (3, 'epoch'))


@needs_mpi
def test_unequal_parts_with_another_iterator():
    on_kept_ranks(2, epochs_of_another_iterator)


def check_epochs(n, batch_size, on_rank_1, optimizers):
    """Check epochs of n examples on rank 0 against the length that rank 1 has sent."""

    class Optimizer(chainer.optimizers.SGD):
        communicator = Comm([0, 0], 0, None)

    Optimizer.communicator.allgather = lambda mine: [mine, on_rank_1]
    iterator = SerialIterator(range(n), batch_size)
    _check_epochs(StandardUpdater(iterator, {name: Optimizer() for name in optimizers}))


# If there are several optimizers, none has to be called "main".
of_one_or_more = pytest.mark.parametrize('optimizers', [('main',), ('gen', 'dis')], ids=str)


@of_one_or_more
def test_batches_may_differ_if_as_many_make_an_epoch(optimizers):
    check_epochs(28, 7, '4 batches', optimizers)


@of_one_or_more
def test_last_batches_that_are_smaller_on_all_ranks(optimizers):
    check_epochs(29, 7, '29 examples in batches of 7', optimizers)


@of_one_or_more
def test_epochs_of_different_lengths(optimizers):
    message = UNEQUAL_EPOCHS % ('4 batches', '5 batches')
    with pytest.raises(ValueError, match='^%s$' % re.escape(message)):
        check_epochs(28, 7, '5 batches', optimizers)


def evaluate(path):
    comm = communicator()
    found = results(comm)
    if comm.rank == 0:
        numpy.savez(path, **found)


def results(comm):
    """Return the values that evaluators report, on all ranks or in this process alone."""
    from chainer_chemistry.training.extensions import BatchEvaluator, R2ScoreEvaluator

    if comm:
        import chainermn
    numpy.random.seed(0)
    model = Regressor(MODELS['NFP'](), lossfun=squared_error, metrics_fun={'mse': squared_error})
    found = {}
    for n in (13, 2):  # two molecules leave one of three ranks without any
        part = data_set(n)
        if comm:
            whole = part if comm.rank == 0 else None
            part = chainermn.scatter_dataset(whole, comm, force_equal_length=False)

        def three_columns(*batch):
            return model.predictor(*batch)[:, :3]

        def iterate(dataset):
            return SerialIterator(dataset, 13, repeat=False, shuffle=False)

        common = {'converter': PACKED, 'device': '@numpy'}
        evaluators = [
            extensions.Evaluator(iterate(part), model, **common),
            BatchEvaluator(
                iterate(part),
                model,
                eval_func=three_columns,
                metrics_fun={'median': lambda y, t: numpy.median(y - t), 'n': lambda y, t: y.size},
                **common,
            ),
            R2ScoreEvaluator(iterate(part), model, eval_func=three_columns, **common),
        ]
        for i, evaluator in enumerate(evaluators):
            if comm:
                evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
            for _ in range(2):
                result = evaluator()
                assert not comm or len({str(r) for r in comm.mpi_comm.allgather(result)}) == 1
            found.update(('%d %d %s' % (n, i, key), value) for key, value in result.items())
    return found


def test_an_evaluator_may_change_its_class():
    """The class may change, because `GraphUpdater` changes it to capture evaluations."""

    class Captured(extensions.Evaluator):
        def evaluate(self):
            return {'loss': numpy.float32(2)}

    evaluator = extensions.Evaluator(SerialIterator([1, 2, 3], 2, repeat=False), None)
    evaluator = create_multi_node_evaluator(evaluator, Comm([3], 0, {'loss': 2.0}))
    evaluator.__class__ = Captured
    assert evaluator.evaluate() == {'loss': 2}


def test_a_value_that_one_rank_reports_is_a_mean_over_its_molecules():
    class Fixed(extensions.Evaluator):
        def evaluate(self):
            return {'loss': 2.0}

    comm = Comm([3, 1], 0, {'loss': 2.0})
    comm.sizes[1] = 1, {'loss': 6.0, 'rare': 4.0}
    evaluator = Fixed(SerialIterator([1, 2, 3], 2, repeat=False), None)
    evaluator = create_multi_node_evaluator(evaluator, comm)
    assert evaluator.evaluate() == {'loss': 3, 'rare': 4}


@needs_mpi
def test_evaluations_are_of_all_molecules(tmp_path):
    on_kept_ranks(3, evaluate, tmp_path / 'of ranks.npz')
    alone = results(None)
    assert len(alone) == 10
    with numpy.load(tmp_path / 'of ranks.npz') as file:
        for key in alone:
            numpy.testing.assert_allclose(file[key], alone[key], 1e-5, err_msg=key)
