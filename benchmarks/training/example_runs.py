"""Run the training scripts of ``examples/`` as a user does."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

from benchmarks.harness import ROOT

OPTIONS = ['--unit-num', '64', '--batchsize', '128']
OWN_OPTIONS = {'tox21': [], 'qm9': ['--label', 'alpha']}
# The products are small: more threads speed up neither model and make the times noisier.
THREADS = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}


def train(example, options):
    """Train an example into a folder that is removed; return its result and its log of epochs."""
    script = ROOT / 'examples' / example / ('train_%s.py' % example)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(script), '--out', folder, *OPTIONS, *OWN_OPTIONS[example]]
            + [str(option) for option in options],
            check=True,
            env=dict(os.environ, PYTHONPATH=path, **THREADS),
        )
        result = json.loads((pathlib.Path(folder) / 'result.json').read_text())
        result['log'] = json.loads((pathlib.Path(folder) / 'log').read_text())
    result['settings']['data'] = os.path.basename(result['settings']['data'])
    return result
