"""``python -m chainer_bspmm info``, and the self-test behind it."""

import re
import sys
import types

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer.backends import cuda
from chainer.training import StandardUpdater

from chainer_bspmm import info, self_test
from chainer_bspmm.cuda import gemm
from chainer_bspmm.ops.graph_linear import products
from chainer_bspmm.training import GraphUpdater
from tests.support.processes import python


@pytest.fixture(scope='module')
def printed(tmp_path_factory):
    """Output of the command, made once for all tests that only read it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv('OMP_NUM_THREADS', '1')
        return python('-m', 'chainer_bspmm', 'info', cwd=tmp_path_factory.mktemp('info')).stdout


@pytest.mark.parametrize(
    'part',
    [
        'chainer_bspmm %s in ' % chainer_bspmm.__version__,
        'Python ',
        '  numpy              %s\n' % numpy.__version__,
        '  chainer            %s\n' % chainer.__version__,
        '  chainer-chemistry  0.7.1',
        '  OMP_NUM_THREADS=1\n',
        'GPU:\n',
    ],
)
def test_the_command_prints_what_a_report_of_a_problem_needs(printed, part):
    assert part in printed


def test_the_command_finds_every_package(printed):
    assert 'missing' not in printed.split('GPU:')[0]


def test_the_command_runs_the_self_test(printed):
    assert '\nSelf-test on @numpy' in printed
    assert printed.endswith('All is well.\n')
    assert 'FAILED' not in printed


def test_all_parts_pass(device):
    outcomes = list(self_test.run(device))
    assert len(outcomes) == len(self_test.METHODS) * 4
    assert {outcome.reason for outcome in outcomes} == {None}


def test_molecules_have_at_most_one_bond_between_two_atoms():
    for _, adj, _ in self_test.molecules('ggnn', 'f'):
        assert set(adj.sum(axis=0).ravel()) <= {0, 1}


def make_wrong(monkeypatch, change):
    """Change the result of every layer of neighbours on a host, and test only one method."""
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
def test_a_wrong_layer_is_named_with_the_reason(monkeypatch, capsys, change, reason):
    make_wrong(monkeypatch, change)
    assert info.info() == 1
    text = capsys.readouterr().out
    assert '  rsgcn                float16 FAILED: ' in text and reason in text
    last = text.splitlines()[-1]
    assert re.fullmatch(r'FAILED: [1-9][0-9]* part\(s\) of the self-test', last)
    assert ('pip install nvidia-cuda-runtime' in text) == (change is raises)


def test_a_wrong_gradient_fails(monkeypatch):
    original = products.graph_linear_grad_on_host

    def doubled(*args):
        return {name: 2 * array for name, array in original(*args).items()}

    monkeypatch.setattr(products, 'graph_linear_grad_on_host', doubled)
    outcomes = self_test.run(chainer.get_device('@numpy'))
    bad = {outcome.method for outcome in outcomes if outcome.reason}
    assert {'rsgcn', 'rsgcn, trained', 'relgcn', 'ggnn', 'gin'} <= bad


def test_a_training_is_captured_on_a_gpu_only(monkeypatch):
    kinds = []
    monkeypatch.setattr(self_test, 'trained', lambda *arguments: kinds.append(arguments[-1]))
    for xp in (numpy, cuda.cupy):
        model = self_test.new_model('rsgcn')
        self_test.trains(model, model, 'rsgcn', 'f', types.SimpleNamespace(xp=xp))
    assert kinds == [StandardUpdater, StandardUpdater, GraphUpdater, StandardUpdater]


@pytest.mark.parametrize('place', ['a', 'b', 'c'])
def test_errors_of_any_array_count(place):
    expected = {'a': numpy.ones(3), 'b': numpy.full(3, 100.0), 'c': numpy.ones(1)}
    for wrong in (numpy.nan, 3.0):
        found = {name: array.copy() for name, array in expected.items()}
        found[place][-1] *= wrong
        assert not self_test.relative_error(found, expected) < 1


def test_errors_of_other_arrays_are_refused():
    with pytest.raises(
        ValueError, match=r"^expected gradients of the same parameters, got only one of \['b'\]$"
    ):
        self_test.relative_error({'a': numpy.ones(3)}, {'a': numpy.ones(3), 'b': numpy.ones(1)})


def test_the_command_exits_with_the_outcome(monkeypatch):
    from chainer_bspmm import __main__

    monkeypatch.setattr(sys, 'argv', ['chainer_bspmm', 'info'])
    make_wrong(monkeypatch, lambda y: -y)
    assert __main__.main() == 1


@pytest.fixture
def installed(monkeypatch):
    """Dict package -> version, or None if not installed, that replaces the installed versions."""
    original = info.version
    versions = {}
    monkeypatch.setattr(info, 'version', lambda name: versions.get(name, original(name)))
    return versions


def test_a_missing_package_is_named_with_a_remedy(installed):
    installed['rdkit'] = None
    missing = [line for line in info.versions() if 'missing' in line]
    advice = "pip install rdkit    (SMILES and Chainer Chemistry's preprocessors need it)"
    assert missing == ['  rdkit              missing: ' + advice]


def test_a_version_of_an_optional_package_is_printed(installed):
    installed['cairosvg'] = '2.7'
    assert '  cairosvg           2.7' in info.versions()


def test_a_missing_optional_package_is_named_with_its_use(installed):
    installed['h5py'] = None
    assert '  h5py               not installed; for HDF5 snapshots' in info.versions()


TWO_PACKAGES = {'cupy-cuda12x': '13.0', 'cupy-cuda13x': '14.2.0'}
NO_CUPY = """\
  missing: CuPy, and this machine has NVIDIA's driver. With the CUDA Toolkit:
    pip install 'chainer_bspmm[cuda13]' (or cuda12)
  without it:
    pip install 'cupy-cuda13x[ctk]' (or cupy-cuda12x)"""


@pytest.mark.parametrize(
    'packages, driver, expected',
    [
        ({}, True, NO_CUPY),
        ({}, False, '  CuPy is not installed, and this machine shows no NVIDIA driver'),
        ({'cupy-cuda13x': '14.2.0'}, True, '  CuPy is installed, but: no libcuda'),
        (
            TWO_PACKAGES,
            True,
            '  more than one CuPy is installed, and they overwrite each other: '
            'pip uninstall -y cupy-cuda12x cupy-cuda13x; then install one',
        ),
    ],
    ids=['driver without CuPy', 'neither', 'CuPy that does not work', 'two packages of CuPy'],
)
def test_what_is_said_without_a_gpu(monkeypatch, packages, driver, expected):
    monkeypatch.setattr(info, 'cupy_packages', lambda: packages)
    monkeypatch.setattr(info, 'has_nvidia_driver', lambda: driver)
    monkeypatch.setattr(cuda, 'available', False)
    monkeypatch.setattr(cuda, '_resolution_error', ImportError('no libcuda'))
    assert expected in info.gpus()


def test_a_driver_that_raises_is_no_gpu(monkeypatch):
    def fail():
        raise RuntimeError('cudaErrorInsufficientDriver')

    runtime = type('runtime', (), {'getDeviceCount': staticmethod(fail)})
    cupy = type('cupy', (), {'cuda': type('cuda', (), {'runtime': runtime})})
    monkeypatch.setattr(cuda, 'available', True)
    monkeypatch.setattr(cuda, 'cupy', cupy)
    assert info.count_gpus() == (0, 'cudaErrorInsufficientDriver')


def test_a_line_is_printed_for_each_device(monkeypatch):
    def properties(i):
        gib = (80, 7.75)[i]
        return {'name': b'GPU %d' % i, 'major': 9 - i, 'minor': i, 'totalGlobalMem': gib * 2**30}

    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 2,
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 12040,
        getDeviceProperties=properties,
    )
    nvrtc = types.SimpleNamespace(getVersion=lambda: (13, 1))
    parts = types.SimpleNamespace(runtime=runtime, nvrtc=nvrtc)
    monkeypatch.setattr(info, 'cupy_packages', lambda: {'cupy-cuda13x': '14.2.0'})
    monkeypatch.setattr(info, 'cublas', lambda: 'libcublas.so.13')
    monkeypatch.setattr(cuda, 'available', True)
    monkeypatch.setattr(cuda, 'cupy', types.SimpleNamespace(cuda=parts))
    assert list(info.gpus()) == [
        '  cupy-cuda13x       14.2.0',
        '  CUDA runtime 13.0, driver for 12.4; NVRTC 13.1',
        '  captured training steps call cuBLAS through libcublas.so.13',
        '  device 0: GPU 0, compute capability 9.0, 80 GiB',
        '  device 1: GPU 1, compute capability 8.1, 8 GiB',
    ]


@pytest.mark.gpu
def test_devices_are_listed():
    text = '\n'.join(info.gpus())
    for part in ('device 0: ', 'compute capability', 'NVRTC', 'cuBLAS through '):
        assert part in text
    assert 'through nothing' not in text


def test_what_captured_steps_call_cublas_through(monkeypatch):
    monkeypatch.setattr(gemm, 'name_of_library', lambda: 'libcublas.so.13')
    monkeypatch.setattr(gemm, 'cublas', lambda: None)
    assert info.cublas() == 'libcublas.so.13'


def test_why_captured_steps_cannot_call_cublas(monkeypatch):
    def fail():
        raise OSError('no libcublas')

    monkeypatch.setattr(gemm, 'cublas', fail)
    assert info.cublas() == 'nothing: OSError: no libcublas'


def test_dotted():
    assert [info.dotted(number) for number in (12040, 13000, 11080)] == ['12.4', '13.0', '11.8']
