"""``python -m chainer_bspmm info``, and the self-test behind it."""

import sys

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer.backends import cuda

from chainer_bspmm import info, self_test
from chainer_bspmm.cuda import gemm
from chainer_bspmm.ops.graph_linear import products
from tests.support.processes import python


def test_command_prints_versions_and_the_self_test(tmp_path, monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    done = python('-m', 'chainer_bspmm', 'info', cwd=tmp_path)
    versions = [('numpy', numpy.__version__), ('chainer', chainer.__version__)]
    parts = ['%-18s %s\n' % version for version in (*versions, ('chainer-chemistry', '0.7.1'))]
    parts += ['chainer_bspmm %s in ' % chainer_bspmm.__version__, 'Python ', 'GPU:\n']
    for part in (*parts, '  OMP_NUM_THREADS=1\n', 'Self-test on @numpy', 'All is well.'):
        assert part in done.stdout
    assert 'FAILED' not in done.stdout and 'missing' not in done.stdout.split('GPU:')[0]


def test_all_parts_pass(device):
    outcomes = list(self_test.run(device))
    assert len(outcomes) == len(self_test.METHODS) * 4
    assert {outcome.reason for outcome in outcomes} == {None}


def wrong(monkeypatch, change):
    monkeypatch.setattr(self_test, 'METHODS', ('rsgcn',))
    original = products.graph_linear_on_host

    def changed(*args, **kwargs):
        return change(original(*args, **kwargs))

    monkeypatch.setattr(products, 'graph_linear_on_host', changed)


def nan_at_the_end(y):
    y[-1, -1] = numpy.nan
    return y


def raises(y):
    raise RuntimeError('cannot open source file "cuda_fp16.h"')


@pytest.mark.parametrize(
    'change, reason',
    [
        (lambda y: y * 1.1, 'relative error'),
        (nan_at_the_end, 'relative error nan'),
        (lambda y: y[:-1], 'ValueError'),
        (raises, 'RuntimeError: cannot open source file "cuda_fp16.h"'),
    ],
)
def test_a_wrong_layer_fails_and_is_named(monkeypatch, capsys, change, reason):
    wrong(monkeypatch, change)
    assert info.info() == 1
    text = capsys.readouterr().out
    assert '  rsgcn                float16 FAILED: ' in text and reason in text
    assert 'part(s) of the self-test' in text
    assert ('pip install nvidia-cuda-runtime' in text) == (change is raises)


def test_a_wrong_gradient_fails(monkeypatch):
    original = products.graph_linear_grad_on_host

    def doubled(*args):
        return {name: 2 * array for name, array in original(*args).items()}

    monkeypatch.setattr(products, 'graph_linear_grad_on_host', doubled)
    outcomes = self_test.run(chainer.get_device('@numpy'))
    bad = {outcome.method for outcome in outcomes if outcome.reason}
    assert {'rsgcn', 'rsgcn, trained', 'relgcn', 'ggnn', 'gin'} <= bad


@pytest.mark.parametrize('place', ['a', 'b', 'c'])
def test_errors_of_any_array_count(place):
    expected = {'a': numpy.ones(3), 'b': numpy.full(3, 100.0), 'c': numpy.ones(1)}
    for wrong in (numpy.nan, 3.0):
        found = {name: array.copy() for name, array in expected.items()}
        found[place][-1] *= wrong
        assert not self_test.relative_error(found, expected) < 1
    with pytest.raises(ValueError, match='gradients of'):
        self_test.relative_error({'a': expected['a']}, expected)


def test_the_command_exits_with_the_outcome(monkeypatch):
    from chainer_bspmm import __main__

    monkeypatch.setattr(sys, 'argv', ['chainer_bspmm', 'info'])
    wrong(monkeypatch, lambda y: -y)
    assert __main__.main() == 1


def test_missing_packages_are_named_with_a_remedy(monkeypatch):
    original = info.version
    versions = {'rdkit': None, 'cairosvg': '2.7', 'h5py': None}
    monkeypatch.setattr(info, 'version', lambda name: versions.get(name, original(name)))
    lines = list(info.versions())
    (missing,) = [line for line in lines if 'missing' in line]
    assert 'rdkit' in missing and 'pip install rdkit' in missing
    assert '  cairosvg           2.7' in lines
    assert '  h5py               not installed; for HDF5 snapshots' in lines


@pytest.mark.parametrize(
    'packages, driver, expected',
    [
        ({}, True, "pip install 'chainer_bspmm[cuda13]'"),
        ({}, False, 'shows no NVIDIA driver'),
        ({'cupy-cuda13x': '14.2.0'}, True, 'CuPy is installed, but: no libcuda'),
        ({'cupy-cuda12x': '13.0', 'cupy-cuda13x': '14.2.0'}, True, 'uninstall -y cupy-cuda12x cup'),
    ],
)
def test_what_is_said_without_a_gpu(monkeypatch, packages, driver, expected):
    monkeypatch.setattr(info, 'cupy_packages', lambda: packages)
    monkeypatch.setattr(info, 'has_nvidia_driver', lambda: driver)
    monkeypatch.setattr(cuda, 'available', False)
    monkeypatch.setattr(cuda, '_resolution_error', ImportError('no libcuda'))
    assert expected in '\n'.join(info.gpus())


def test_a_driver_that_raises_is_no_gpu(monkeypatch):
    def fail():
        raise RuntimeError('cudaErrorInsufficientDriver')

    runtime = type('runtime', (), {'getDeviceCount': staticmethod(fail)})
    cupy = type('cupy', (), {'cuda': type('cuda', (), {'runtime': runtime})})
    monkeypatch.setattr(cuda, 'available', True)
    monkeypatch.setattr(cuda, 'cupy', cupy)
    assert info.count_gpus() == (0, 'cudaErrorInsufficientDriver')


@pytest.mark.gpu
def test_devices_are_listed():
    text = '\n'.join(info.gpus())
    for part in ('device 0: ', 'compute capability', 'NVRTC', 'cuBLAS through '):
        assert part in text
    assert 'through nothing' not in text


def test_what_captured_steps_call_cublas_through(monkeypatch):
    def fail():
        raise OSError('no libcublas')

    monkeypatch.setattr(gemm, 'name_of_library', lambda: 'libcublas.so.13')
    of_error = 'nothing: OSError: no libcublas'
    for cublas, expected in ((lambda: None, 'libcublas.so.13'), (fail, of_error)):
        monkeypatch.setattr(gemm, 'cublas', cublas)
        assert info.cublas() == expected


def test_dotted():
    assert [info.dotted(number) for number in (12040, 13000, 11080)] == ['12.4', '13.0', '11.8']
