"""What the tests of GIN and NFP do alike: a swap inside a wrapper, and a step of training."""

import copy

import numpy

import chainer
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols

from benchmarks.parity import double
from benchmarks.parity import to_double
from chainer_bspmm import concat_mols
from chainer_bspmm import sparsify
from tests.models.test_rsgcn import assert_parity
from tests.support import relative_error


def check_swap_in_place_and_snapshots(tmp_path, wrapper, kind, examples, randomise):
    def predictions(model, converter):
        with chainer.using_config('train', False):
            return numpy.concatenate([model(*converter([e])[:2]).array for e in examples])

    dense = wrapper()
    predictions(dense, dense_concat_mols)
    expected = predictions(randomise(dense), dense_concat_mols)
    chainer.serializers.save_npz(tmp_path / 'dense.npz', dense)
    fresh = sparsify(wrapper())
    chainer.serializers.load_npz(tmp_path / 'dense.npz', fresh)
    assert relative_error(predictions(fresh, concat_mols), expected) < 1e-5
    chainer.serializers.save_npz(tmp_path / 'sparse.npz', fresh)
    again = wrapper()
    chainer.serializers.load_npz(tmp_path / 'sparse.npz', again)
    numpy.testing.assert_array_equal(predictions(again, dense_concat_mols), expected)
    before = dict(dense.namedparams())
    assert sparsify(dense) is dense and type(dense.graph_conv) is kind
    after = dict(dense.namedparams())
    assert before.keys() == after.keys() and all(before[key] is after[key] for key in before)
    assert relative_error(predictions(dense, concat_mols), expected) < 1e-5


def check_one_training_step(device, dense, examples, rate):
    def step(model, batch):
        *inputs, t = batch
        own = chainer.optimizers.MomentumSGD(lr=rate).setup(model)
        model.cleargrads()
        for _ in range(2):
            own.update(lambda: chainer.functions.mean_squared_error(model(*inputs), t))
        return {name: cuda.to_cpu(p.array) for name, p in model.namedparams()}

    truth, model = to_double(dense), sparsify(copy.deepcopy(dense))
    model.to_device(device)
    truth = step(truth, double(dense_concat_mols(examples)))
    assert_parity(
        step(model, concat_mols(examples, device)), step(dense, dense_concat_mols(examples)), truth
    )
