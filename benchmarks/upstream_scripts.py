"""Do Chainer Chemistry's example scripts run, unchanged and with the two lines, for every method?

Takes a checkout of Chainer Chemistry 0.7.1: no package has its examples. Every script, training and
predicting, runs on the CPU for one epoch in a folder of its own, on small files that lie where it
would download its data: molecules of QM9's sample, and labels and graphs that are made up::

    python -m benchmarks.upstream_scripts --checkout chainer-chemistry

writes ``benchmarks/results/cpu/upstream_scripts.json`` and prints a line for each run, in about 20
minutes on two cores. A script
under ``python -m chainer_bspmm run`` is as it is; for the two lines a copy is edited: its predictor
goes through ``sparsify``, and its converter is the one that ``docs/methods.md`` names.
"""

import ast
import collections
import concurrent.futures
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import chainer_bspmm  # NOQA: F401  (before chainer)
from chainer.dataset import download
from chainer_chemistry.datasets import qm9
from chainer_chemistry.datasets import tox21
from chainer_chemistry.datasets.molnet import molnet
import numpy
import pandas
from rdkit import Chem

from benchmarks import data_sets
from benchmarks import harness
from benchmarks.training import example_runs

N_MOLECULES, N_NODES = 120, 60
SECONDS = 600  # after which a run is given up

# train, predict: script and options; {data} stands for the folder of the data. of_networks: it
# wants modules of the checkout, which the wheel lacks, and other lines than the two.
Example = collections.namedtuple('Example', 'train predict of_networks', defaults=(None, False))
SMALL = ' -e 1 -b 32 -u 8 -c 2 -m {method}'
OWN = ' --label value1 value2 --datafile {data}/own.csv'
EXAMPLES = {
    'qm9': Example('train_qm9.py -l A' + SMALL, 'predict_qm9.py -l A -m {method}'),
    'tox21': Example('train_tox21.py -l NR-AR' + SMALL, 'predict_tox21_with_classifier.py'),
    'own_dataset': Example(
        'train_own_dataset.py' + SMALL + OWN, 'predict_own_dataset.py -m {method}' + OWN
    ),
    'molnet': Example('train_molnet.py -d bbbp' + SMALL, 'predict_molnet.py -d bbbp -m {method}'),
    'molnet_wle': Example(
        'train_molnet_wle.py -d bbbp' + SMALL, 'predict_molnet_wle.py -d bbbp -m {method}'
    ),
    'network_graph': Example('train_network_graph.py -e 1 -m {method}', of_networks=True),
    'network_graph, --coo': Example(
        'train_network_graph.py -e 1 --coo true -m {method}', of_networks=True
    ),
}


# --- data where the scripts look for it ---


def write_data(root):
    """Write the files that the scripts would download, below a folder of Chainer's data sets."""
    previous = download.get_dataset_root()
    download.set_dataset_root(str(root))
    try:
        _write_molecules(root)
    finally:
        download.set_dataset_root(previous)
    _write_citations(root / 'pfnet' / 'chainer' / 'cora')


def _write_molecules(root):
    smiles, targets, _ = data_sets.qm9(N_MOLECULES)
    names = tox21.get_tox21_label_names()
    labels = numpy.random.RandomState(0).randint(0, 2, (len(smiles), len(names)))
    frame = pandas.DataFrame(targets, columns=qm9.get_qm9_label_names())
    frame.insert(0, 'SMILES2', smiles)
    frame.insert(0, 'SMILES1', smiles)
    frame.to_csv(qm9.get_qm9_filepath(download_if_not_exist=False))
    for part in 'train', 'val', 'test':
        with Chem.SDWriter(tox21.get_tox21_filepath(part, download_if_not_exist=False)) as writer:
            for one, row in zip(smiles, labels):
                molecule = Chem.MolFromSmiles(one)
                for name, label in zip(names, row):
                    molecule.SetProp(name, str(label))
                writer.write(molecule)
    classes = pandas.DataFrame({'num': range(len(smiles)), 'p_np': labels[:, 0], 'smiles': smiles})
    classes.to_csv(molnet.get_molnet_filepath('bbbp', download_if_not_exist=False))
    own = pandas.DataFrame({'SMILES': smiles, 'value1': targets[:, 0], 'value2': targets[:, 1]})
    own.to_csv(root / 'own.csv', index=False)


def _write_citations(folder):
    """Write a graph in Cora's format: names, words and topic of each node; links."""
    folder.mkdir(parents=True)
    nodes = ['%d\t%d\t%d\t1\ttopic%d\n' % (i, i % 2, i % 5 == 0, i % 3) for i in range(N_NODES)]
    (folder / 'cora.content').write_text(''.join(nodes))
    rng = numpy.random.RandomState(0)
    links = ['%d\t%d\n' % tuple(pair) for pair in rng.randint(0, N_NODES, (3 * N_NODES, 2))]
    (folder / 'cora.cites').write_text(''.join(links))


# --- scripts ---


def methods_of(source):
    """Return the methods that a script offers, its ``method_list``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == 'method_list':
            return ast.literal_eval(node.value)
    raise ValueError('the script has no method_list')


# Converters of the methods that take lists of edges.
OF_EDGES = {
    method: '(lambda batch, device=None: chainer_bspmm.CSRConverter("packed")('
    'chainer_bspmm.dataset.to_sparse(batch, %s), device))' % n_edge_types
    for method, n_edge_types in (('gin_sparse', None), ('relgcn_sparse', 4))
}
CONVERTERS = re.compile(  # where they are read
    r'(?<![\w.])(?:\w+\.converter\b|converter_method_dict\[[\w.]+\])(?!\s*=[^=])'
)


def with_two_lines(source, method):
    """Return a script with the edits of README, for one of its methods.

    Raises:
        ValueError: there is neither a predictor nor a converter to be seen in it.
    """
    source, n_models = re.subn(
        r'\b(Regressor|Classifier)\((\w+),', r'\1(chainer_bspmm.sparsify(\2),', source
    )
    converter = OF_EDGES.get(method, 'chainer_bspmm.concat_mols')
    source, n_converters = CONVERTERS.subn(lambda match: converter, source)
    source, n_imports = re.subn(
        r'from chainer_chemistry\.dataset\.converters import concat_mols\b',
        'from chainer_bspmm import concat_mols',
        source,
    )
    if not n_models + n_converters + n_imports:
        raise ValueError('found nothing to edit')
    futures = list(re.finditer(r'^from __future__ .*\n', source, re.MULTILINE))
    place = futures[-1].end() if futures else 0
    return source[:place] + 'import chainer_bspmm\n' + source[place:]


def run_example(checkout, data, example, method):
    """Run the scripts of an example for one method, unchanged and with the two lines.

    Returns:
        dict: way -> script -> None, or the end of what a script that failed printed.
    """
    of = EXAMPLES[example]
    folder = example.partition(',')[0]
    found = {}
    for way in ('unchanged',) if of.of_networks else ('unchanged', 'two lines'):
        found[way] = {}
        with tempfile.TemporaryDirectory() as root:
            place = pathlib.Path(root) / folder
            shutil.copytree(checkout / 'examples' / folder, place)
            for line in filter(None, (of.train, of.predict)):
                name, *options = line.format(method=method, data=data).split()
                script = place / name
                if way == 'two lines':
                    script.write_text(with_two_lines(script.read_text(), method))
                argv = [str(script), *options]
                if way == 'unchanged':
                    argv = ['-m', 'chainer_bspmm', 'run', *argv]
                path = [str(checkout)] if of.of_networks else []
                found[way][name] = run(argv, place, path, data)
                if found[way][name]:
                    break
    return found


def run(argv, cwd, path, data):
    """Run one script; return None, or the end of what it printed."""
    environment = dict(example_runs.environment(), CHAINER_DATASET_ROOT=str(data))
    environment['PYTHONPATH'] = os.pathsep.join([*path, environment['PYTHONPATH']])
    try:
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 'no end after %d seconds' % SECONDS
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or ['exit status %d' % done.returncode]
    # From the line that names the error: a refusal has two.
    starts = [i for i, line in enumerate(lines) if re.match(r'[\w.]+: ', line)]
    return ' / '.join(lines[starts[-1] if starts else -1 :])


def main(argv=None):
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--checkout', type=pathlib.Path, required=True, help='of Chainer Chemistry')
    parser.add_argument('--examples', nargs='+', choices=EXAMPLES, default=list(EXAMPLES))
    args = parser.parse_args(argv)
    checkout = args.checkout.resolve()
    result = {
        'conditions': harness.conditions(args.commit),
        'scripts': {},  # name -> SHA-256
        'examples': collections.defaultdict(dict),
    }
    with (
        tempfile.TemporaryDirectory() as data,
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        data = pathlib.Path(data)
        write_data(data)
        runs = {}
        for example in args.examples:
            folder = checkout / 'examples' / example.partition(',')[0]
            for line in filter(None, EXAMPLES[example][:2]):
                script = folder / line.split()[0]
                name = script.relative_to(checkout).as_posix()
                result['scripts'][name] = hashlib.sha256(script.read_bytes()).hexdigest()
            for method in methods_of((folder / EXAMPLES[example].train.split()[0]).read_text()):
                runs[example, method] = pool.submit(run_example, checkout, data, example, method)
        for (example, method), future in runs.items():
            found = result['examples'][example][method] = future.result()
            for way, scripts in found.items():
                for name, message in scripts.items():
                    print('%s %s, %s, %s: %s' % (example, method, way, name, message or 'ok'))
    print('wrote', harness.save('upstream_scripts', result, args.out))


if __name__ == '__main__':
    main()
