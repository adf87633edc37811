"""``python -m chainer_bspmm info``: versions, devices and a self-test, for bug reports."""

import importlib.metadata
import itertools
import os
import pathlib
import platform
import shutil
import sys

import chainer
from chainer.backends import cuda

import chainer_bspmm
from chainer_bspmm import self_test
from chainer_bspmm.cuda import gemm
from chainer_bspmm.dataset import cache

LIBRARIES = 'numpy', 'scipy', 'rdkit', 'pandas', 'scikit-learn', 'matplotlib', 'tqdm'
PACKAGES = 'chainer', 'chainer-chemistry', *LIBRARIES
# Packages that Chainer and Chainer Chemistry use only if they are installed -> their use.
OPTIONAL = {
    'cairosvg': 'saliency as PNG',
    'networkx': 'network graphs, with a checkout of Chainer Chemistry',
    'pymatgen': 'crystals',
    'seaborn': "plot scripts of Chainer Chemistry's examples",
    'h5py': 'HDF5 snapshots',
    'mpi4py': 'several processes',
}
ADVICE = {
    'rdkit': "pip install rdkit    (SMILES and Chainer Chemistry's preprocessors need it)",
    'chainer': "pip install 'setuptools<81' wheel; pip install --no-build-isolation chainer==7.8.1",
}
OF_THREADS = 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'
OF_CUDA = 'CUDA_VISIBLE_DEVICES', 'CUDA_PATH', 'CUPY_CACHE_DIR'
OF_CHAINER = 'CHAINER_DTYPE', 'CHAINER_USE_IDEEP', 'CHAINER_DATASET_ROOT'
VARIABLES = *OF_THREADS, *OF_CUDA, *OF_CHAINER, cache.VARIABLE, 'XDG_CACHE_HOME'
FLOAT16_ADVICE = (
    "float16 needs the CUDA runtime's headers, of the same version as the toolkit:\n"
    '  pip install nvidia-cuda-runtime (CUDA 13), nvidia-cuda-runtime-cu12 (CUDA 12)'
)


def version(package):
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cupy_packages():
    """Return name -> version of every installed package that contains CuPy."""
    packages = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata['Name'] or '').lower()
        if name == 'cupy' or name.startswith(('cupy-cuda', 'cupy-rocm')):
            packages[name] = distribution.version
    return packages


def has_nvidia_driver():
    """Return whether this machine has NVIDIA's driver, with or without CuPy."""
    driver = pathlib.Path('/proc/driver/nvidia/version')
    return driver.exists() or shutil.which('nvidia-smi') is not None


def count_gpus():
    """Return the number of GPUs that CuPy finds, and the reason if it finds none (str), or None."""
    if not cuda.available:
        return 0, str(cuda._resolution_error)
    try:
        n = cuda.cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # without a driver it raises
        return 0, str(error)
    return n, None if n else 'it finds no device'


def dotted(number):
    """Return CUDA's version number as text: 12040 is 12.4."""
    return '%d.%d' % (number // 1000, number % 1000 // 10)


def versions():
    """Yield the lines about versions, with advice for missing packages."""
    folder = pathlib.Path(chainer_bspmm.__file__).parent
    yield 'chainer_bspmm %s in %s' % (chainer_bspmm.__version__, folder)
    words = platform.python_version(), platform.python_implementation(), platform.platform()
    yield 'Python %s (%s), %s' % words
    for package in PACKAGES:
        missing = 'missing: %s' % ADVICE.get(package, 'pip install ' + package)
        yield '  %-18s %s' % (package, version(package) or missing)
    for package, use in OPTIONAL.items():
        yield '  %-18s %s' % (package, version(package) or 'not installed; for %s' % use)
    for name in VARIABLES:
        if name in os.environ:
            yield '  %s=%s' % (name, os.environ[name])


def cublas():
    """Return the library through which captured steps call cuBLAS (str), or the reason if none."""
    try:
        gemm.cublas()
    except Exception as error:  # any problem here belongs in the report
        return 'nothing: %s: %s' % (type(error).__name__, error)
    return gemm.name_of_library()


def gpus():
    """Yield the lines about CuPy and its devices."""
    packages = cupy_packages()
    for name, number in packages.items():
        yield '  %-18s %s' % (name, number)
    if len(packages) > 1:
        yield (
            '  more than one CuPy is installed, and they overwrite each other: '
            'pip uninstall -y %s; then install one' % ' '.join(packages)
        )
    n_gpus, reason = count_gpus()
    if not n_gpus:
        yield '  none that CuPy can use; products run on SciPy'
        if packages:
            yield '  CuPy is installed, but: %s' % reason
        elif has_nvidia_driver():
            yield (
                "  missing: CuPy, and this machine has NVIDIA's driver. With the CUDA Toolkit:\n"
                "    pip install 'chainer_bspmm[cuda13]' (or cuda12)\n  without it:\n"
                "    pip install 'cupy-cuda13x[ctk]' (or cupy-cuda12x)"
            )
        else:
            yield '  CuPy is not installed, and this machine shows no NVIDIA driver'
        return
    runtime = cuda.cupy.cuda.runtime
    yield '  CUDA runtime %s, driver for %s; NVRTC %d.%d' % (
        dotted(runtime.runtimeGetVersion()),
        dotted(runtime.driverGetVersion()),
        *cuda.cupy.cuda.nvrtc.getVersion(),
    )
    yield '  captured training steps call cuBLAS through ' + cublas()
    for i in range(n_gpus):
        properties = runtime.getDeviceProperties(i)
        yield '  device %d: %s, compute capability %d.%d, %.0f GiB' % (
            i,
            properties['name'].decode(),
            properties['major'],
            properties['minor'],
            properties['totalGlobalMem'] / 2**30,
        )


def summary(outcomes):
    """Return one line for the outcomes of one method in its dtypes."""
    parts = []
    for outcome in outcomes:
        dtype = {'e': 'float16', 'f': 'float32', 'd': 'float64'}[outcome.dtype]
        if outcome.reason is None:
            parts.append('%s %.0e' % (dtype, outcome.error))
        else:
            # Compiler messages are long; the first lines are enough.
            parts.append('%s FAILED: %s' % (dtype, ' '.join(outcome.reason.split())[:300]))
    return '  %-20s %s' % (outcomes[0].method, '; '.join(parts))


def test(device):
    """Print the outcome of the self-test on a device, one line a method; return the failures."""
    failures = []
    for _, of_method in itertools.groupby(self_test.run(device), lambda outcome: outcome.method):
        outcomes = list(of_method)
        print(summary(outcomes), flush=True)
        failures += [outcome for outcome in outcomes if outcome.reason is not None]
    return failures


def info():
    """Print versions, devices and the self-test on all of them; return the exit status."""
    for line in versions():
        print(line)
    print('Parsed SMILES are kept in %s' % cache.directory())
    print('GPU:')
    for line in gpus():
        print(line)
    sys.stdout.flush()
    failures = []
    for name in ['@numpy'] + ['@cupy:%d' % i for i in range(count_gpus()[0])]:
        device = chainer.get_device(name)
        print(
            'Self-test on %s, largest relative error against the dense models in float32:%s'
            % (name, '' if name == '@numpy' else ' (kernels are compiled first)'),
            flush=True,
        )
        failures += test(device)
    if any('cuda_fp16' in outcome.reason for outcome in failures):
        print(FLOAT16_ADVICE)
    print('FAILED: %d part(s) of the self-test' % len(failures) if failures else 'All is well.')
    return 1 if failures else 0
