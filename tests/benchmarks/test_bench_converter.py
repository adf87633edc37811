"""The benchmark of the converters runs without a GPU, and refuses batches that differ."""

import json

import numpy
import pytest

pytest.importorskip('rdkit')

from benchmarks.data_sets import QM9_SAMPLE  # NOQA: E402
from benchmarks.training import bench_converter  # NOQA: E402
from chainer_bspmm.dataset import to_sparse  # NOQA: E402
from tests.support.data_sets import molecules  # NOQA: E402


def test_on_a_sample(tmp_path, capsys):
    bench_converter.main(
        [
            *'--data'.split(),
            str(QM9_SAMPLE),
            *'--limit 40 --rounds 1 --commit none --out'.split(),
            str(tmp_path),
        ]
    )
    result = json.loads((tmp_path / 'converter.json').read_text())
    assert set(result['methods']) == set(bench_converter.METHODS)
    for found in result['methods'].values():
        times = found['microseconds a molecule']['32']
        assert set(times) == {
            bench_converter.UPSTREAM,
            bench_converter.DENSE,
            bench_converter.SPARSE,
        }
        assert all(time['median'] > 0 for of in times.values() for time in of.values())
        memory = found['memory']
        assert memory['padded dense'] >= memory['dense'] > 0 < memory['sparse']
    assert 'batch   32' in capsys.readouterr().out


def test_other_batches_are_refused():
    dense = molecules((3, 2, 4), n_labels=1)
    bench_converter.check(dense, to_sparse(dense), to_sparse(dense), numpy.arange(3))
    wrong = [(atoms, adj * 2, label) for atoms, adj, label in dense]
    for sparse, direct in ((wrong, dense), (dense, wrong)):
        with pytest.raises(AssertionError):
            bench_converter.check(dense, to_sparse(sparse), to_sparse(direct), numpy.arange(3))
