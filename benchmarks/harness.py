"""Shared parts of all benchmarks: arguments, gate on errors, medians, conditions, result files."""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import warnings

import chainer_bspmm
import chainer
from chainer.backends import cuda
import numpy

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
# Folders of results: of the GPU whose results the pages have, and of results that are not measured
# again.
GPU = 'nvidia-h200'
EARLIER = 'earlier'
NAMES = {'tox21': 'Tox21', 'qm9': 'QM9'}
TITLES = {
    'rsgcn': 'RSGCN',
    'relgcn': 'RelGCN',
    'ggnn': 'GGNN',
    'gin': 'GIN',
    'nfp': 'NFP',
    'relgat': 'RelGAT',
    'gnnfilm': 'GNNFiLM',
    'mpnn': 'MPNN',
}


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        '--commit',
        type=_commit,
        default='',  # argparse passes it to the type, which asks git before the benchmark begins
        help='commit to record in the result; default: ask git',
    )
    parser.add_argument(
        '--out',
        help='folder of the result; default: results/<gpu or cpu>. A result there of the same '
        'commit, device, versions and options is completed: nothing is measured twice',
    )
    return parser


def device_of(name: str) -> chainer.backend.Device:
    """Make a device current and return it; `name` is a number (-1: CPU) or a name of Chainer."""
    # Chainer's warnings are ignored: it runs without cuDNN, and some of its kernels use atomics.
    warnings.simplefilter('ignore')
    device = chainer.get_device(int(name) if name.lstrip('-').isdigit() else name)
    device.use()
    return device


def relative_error(actual, expected) -> float:
    """Return ||actual - expected|| / ||expected|| in float64, computed where `expected` is."""
    if isinstance(expected, numpy.ndarray):
        actual = cuda.to_cpu(actual)
    expected = expected.astype('d')
    norm = float((expected**2).sum() ** 0.5)
    return float(((actual - expected) ** 2).sum() ** 0.5) / (norm or 1.0)


def number(value):
    """Round a value to two or three digits; None stays None."""
    if value is None:
        return None
    return '%.*f' % (2 if value < 1 else 1 if value < 10 else 0, value)


def gate(errors: dict, limit: float) -> None:
    """Raise AssertionError unless all relative errors are below a limit; NaN never is."""
    if not all(error < limit for error in errors.values()):
        raise AssertionError('relative errors %s, expected below %g' % (errors, limit))


def summary(values) -> dict:
    """Return the median and the 10th and 90th percentile."""
    low, high = numpy.percentile(values, [10, 90])
    numbers = {'median': statistics.median(values), 'low': low, 'high': high}
    return {name: float('%.4g' % value) for name, value in numbers.items()}


def _commit(name: str) -> str:
    """Return a commit's name; '' asks git, with ``-dirty`` if files other than results differ."""
    if name:
        return name
    try:
        name = _git('describe', '--always')
        changes = _git('status', '--porcelain', '-uno', '.', ':!benchmarks/results')
    except (OSError, subprocess.CalledProcessError):
        raise argparse.ArgumentTypeError(
            f'git cannot name the commit of {ROOT}; name the measured version by --commit v1.0'
        ) from None
    return name + '-dirty' * bool(changes)


def _git(*words):
    command = ['git', *words]
    found = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    return found.stdout.strip()


def conditions(commit, device) -> dict:
    """Return the conditions of a result: the name of the commit, the device, the libraries."""
    found = {'date': datetime.date.today().isoformat(), 'commit': commit}
    if device.xp is numpy:
        found.update(cpu=_cpu(), n_cpus=os.cpu_count())
    else:
        runtime = cuda.cupy.cuda.runtime
        found.update(
            gpu=runtime.getDeviceProperties(device.device.id)['name'].decode(),
            driver=_driver(),
            cuda=runtime.runtimeGetVersion(),
            cupy=cuda.cupy.__version__,
        )
    found.update(
        chainer=chainer.__version__,
        chainer_bspmm=chainer_bspmm.__version__,
        numpy=numpy.__version__,
        python=platform.python_version(),
    )
    return found


def step_conditions(commit, device) -> dict:
    """Return the :func:`conditions` of a training step, with more libraries, and threads."""
    found = conditions(commit, device)
    if device.xp is numpy:
        found['threads'] = os.environ.get('OMP_NUM_THREADS', 'not limited')
    for name in ('torch', 'torch_geometric', 'jax', 'optax'):
        if importlib.util.find_spec(name):
            found[name] = importlib.metadata.version(name)
    return found


def _cpu():
    info = pathlib.Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(':')[1].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor() or platform.machine()


def _driver():
    command = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout.split()[0]


def bar(value, met, digits=2) -> dict:
    """Return a bar in the form in which it is stored: the rounded value, and whether it is met."""
    return {'value': value if value is None else round(float(value), digits), 'met': bool(met)}


def print_bars(bars):
    """Print {bar: {'value', 'met'}}, one bar per line."""
    for bar, of in bars.items():
        print('%s: %s (%s)' % (bar, 'met' if of['met'] else 'MISSED', of['value']))


def place(result: dict) -> str:
    """Return the folder of a result, ``<gpu or cpu>``."""
    return result.get('conditions', {}).get('gpu', 'cpu').lower().replace(' ', '-')


def resumed(name: str, head: dict, out=None) -> dict:
    """Return the stored result to be completed if it begins as `head` does, otherwise `head`.

    `head`: the part of a result that is known before a measurement: conditions, method, options.
    The date may differ. A result of a commit with changes (``-dirty``) is not completed, because
    the changes are unknown.
    """
    path = _path(name, head, out)
    if not path.exists():
        return head
    stored, head = json.loads(path.read_text()), json.loads(json.dumps(head))
    old, new = (
        {**{key: of.get(key) for key in head}, **of['conditions'], 'date': 0, 'conditions': 0}
        for of in (stored, head)
    )
    differs = sorted(key for key in {**old, **new} if old.get(key) != new.get(key))
    if new['commit'].endswith('-dirty'):
        differs = ['files than the commit']
    print(
        '%s %s' % (path, 'begins anew: other %s' % ', '.join(differs) if differs else 'continues')
    )
    return head if differs else stored


def stored(name: str, on_cpu: bool = False, results: pathlib.Path = RESULTS) -> pathlib.Path:
    """Return the path of a result, or of an earlier one if it was not measured again."""
    path = results / ('cpu' if on_cpu else GPU) / (name + '.json')
    return path if path.exists() else results / EARLIER / (name + '_cpu' * on_cpu + '.json')


def save(name: str, result: dict, out=None, text: str | None = None) -> pathlib.Path:
    """Write ``results/<gpu or cpu>/<name>.json``, or to the folder `out`; return its path.

    `text`: the contents of the file; None means indented JSON.
    """
    path = _path(name, result, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix('.part')
    part.write_text(json.dumps(result, indent=1) + '\n' if text is None else text)
    part.replace(path)  # so that the file is whole even if the run is killed
    return path


def _path(name, result, out):
    return (pathlib.Path(out) if out else RESULTS / place(result)) / (name + '.json')
