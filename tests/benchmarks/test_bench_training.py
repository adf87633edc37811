"""The benchmark of training steps runs without a GPU, and refuses models that differ."""

import copy
import json

import numpy
import pytest

pytest.importorskip('rdkit')

import chainer  # NOQA: E402
from benchmarks.training import bench_training as bench  # NOQA: E402
from benchmarks import data_sets  # NOQA: E402
from rdkit import Chem  # NOQA: E402

HOST = chainer.get_device('@numpy')


@pytest.fixture(scope='module')
def sets():
    smiles, labels, _ = data_sets.tox21(limit=30)
    return data_sets.of_method(smiles, labels, 'rsgcn')


@pytest.mark.slow
def test_every_method_on_both_data_sets(tmp_path, capsys):
    bench.main(
        [*'--limit 16 --seconds 0 --batches 4 99 --commit none --out'.split(), str(tmp_path)]
    )
    result = json.loads((tmp_path / 'training.json').read_text())
    assert result['conditions']['commit'] == 'none'
    for found in result['data'].values():
        assert set(found['methods']) == set(bench.METHODS) >= set(bench.FIVE)
        for method in found['methods'].values():
            assert list(method['batches']) == ['4']  # 99 are more than there are
            batch = method['batches']['4']
            assert batch['n_rounds'] == bench.MIN_ROUNDS
            assert {bench.UPSTREAM, *bench.LAYOUTS} <= set(batch['milliseconds'])
            for times in batch['milliseconds'].values():
                training = times['training']
                assert list(training['parts']) == list(bench.TRAINING)
                assert training['with converter']['median'] > training['without']['median'] > 0
            assert min(batch['peak_bytes'].values()) > 0
            nodes = {name: sum(counts.values()) for name, counts in method['nodes a step'].items()}
            assert nodes[bench.FOLDED] == nodes[bench.PACKED] < nodes[bench.UPSTREAM]
    assert 'batch    4' in capsys.readouterr().out


def test_wrong_models_are_refused(sets):
    found = bench.contenders('rsgcn', *sets, device=HOST)
    index = list(range(6))
    bench.check(found, index)
    for name in bench.LAYOUTS:
        wrong = dict(found, **{name: copy.deepcopy(found[name])})
        next(wrong[name].model.params()).array[...] *= 1.001
        with pytest.raises(AssertionError, match='relative errors'):
            bench.check(wrong, index)


@pytest.mark.slow
def test_contenders_get_the_same_molecules_and_train(sets):
    found = bench.contenders('rsgcn', *sets, device=HOST)
    before = {
        name: [p.array.copy() for p in contender.model.params()]
        for name, contender in found.items()
        if contender.is_chainer
    }
    times, n_rounds = bench.measure_steps(found, 30, 8, 0)
    assert n_rounds == bench.MIN_ROUNDS and set(times) == set(found)
    for name, arrays in before.items():
        assert any((old != new.array).any() for old, new in zip(arrays, found[name].model.params()))


def test_bars():
    def met(place, milliseconds, sparse=100, method='gin'):
        times = {bench.UPSTREAM: 10.0, bench.FOLDED: milliseconds, bench.PACKED: 0.1}
        methods = {
            method: {
                'adjacency of the set': {'sparse': sparse, 'padded dense': 5000},
                'batches': {
                    '128': {
                        'milliseconds': {
                            name: {'training': {'with converter': {'median': ms}}}
                            for name, ms in times.items()
                        }
                    }
                },
            }
        }
        return list(bench.bars_met(methods, place).values())

    assert met('cpu', 2.4) == [True, True]
    assert met('cpu', 2.6, 101) == [False, False]
    assert met('cpu', 1.3, method='nfp') == [False, True]
    assert met('cpu', 1.2, method='nfp') == met('gpu', 6.6, method='nfp') == [True, True]


def test_what_does_not_fit_into_memory_is_left_out(sets, monkeypatch):
    assert bench.fits('rsgcn', 10**6, 132, HOST)
    assert bench.fits('relgat', 1, 10, HOST) and not bench.fits('relgat', 10**6, 132, HOST)
    monkeypatch.setattr(bench, 'fits', lambda *_: False)
    result = bench.run_method('rsgcn', *sets, device=HOST, batches=[8], seconds=0)
    batch = result['batches']['8']
    assert bench.UPSTREAM in batch['not_run'] and bench.UPSTREAM not in batch['milliseconds']
    assert 'nan' in ' '.join(bench.table({'rsgcn': result}))


def test_generated_molecules_have_the_sizes_of_tox21():
    smiles, labels, _ = data_sets.tox21(limit=2000)
    sizes = [Chem.MolFromSmiles(text).GetNumAtoms() for text in smiles]
    assert 15 <= numpy.median(sizes) <= 17 and 17 < numpy.mean(sizes) < 20
    assert 50 < numpy.percentile(sizes, 99) < 75
    assert max(sizes) <= data_sets.TOX21_LARGEST
    assert labels.shape == (2000, 12) and set(labels.ravel()) == {-1, 0, 1}
    for n in (1, 2, 40, 132):
        text = data_sets.chain(numpy.random.RandomState(n), n)
        assert Chem.MolFromSmiles(text).GetNumAtoms() == n


@pytest.mark.parametrize('method', ['rsgcn', 'gin', 'relgcn'])
def test_peers_learn(method):
    pytest.importorskip('torch_geometric')
    from benchmarks.peers import geometric_models

    smiles, labels, _ = data_sets.tox21(limit=8)
    _, sparse = data_sets.of_method(smiles, labels, method)
    contender = geometric_models.Contender(
        method, geometric_models.examples_of(sparse), 16, 2, labels.shape[1], HOST
    )
    index = list(range(8))
    batch = contender._convert(index, [])
    losses = []
    for _ in range(60):
        losses.append(float(geometric_models._loss(contender._model(batch), batch.y).detach()))
        contender.train(index)
    assert losses[-1] < 0.7 * losses[0]
