"""Models and data of the benchmarks of training and prediction, and arguments to choose them."""

import collections
import contextlib
import io

import chainer_bspmm
import chainer
from chainer import functions
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.datasets import NumpyTupleDataset
from chainer_chemistry.models.mlp import MLP
from chainer_chemistry.models.mpnn import MPNN
from chainer_chemistry.models.prediction import Classifier, GraphConvPredictor, Regressor
from chainer_chemistry.models.prediction import set_up_predictor
import numpy

from benchmarks import data_sets, harness
from chainer_bspmm.dataset import smiles, to_sparse
from chainer_bspmm.models import METHODS as NAMED

FIVE = ('rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp')
LARGE = ('relgat', 'gnnfilm', 'ggnn_gwm', 'rsgcn_gwm', 'gin_gwm', 'nfp_gwm')
METHODS = (*LARGE, 'mpnn', *(name for name in NAMED if name not in LARGE))
N_UNIT, N_LAYERS = 64, 4

# Chainer's own classes must not be adopted, because some contenders are these classes.
vars(chainer.global_config)['bspmm_capture'] = False

# A method on a data set. model: upstream's model, on the host. dense, data: the data set for
# upstream, and for ours. converters: layout -> our converter.
Subject = collections.namedtuple('Subject', 'model dense data converters')


def subject_of(method, read, sets, n_unit=N_UNIT, n_layers=N_LAYERS):
    """Return the `Subject` of a method of `METHODS`.

    `read`: SMILES and labels. `sets`: dict that keeps data sets for several methods. `n_unit`,
    `n_layers`: the width and the number of the model's layers.
    """
    base, _, variant = method.partition('_')
    dense, data = of_kind(sets, read, method if variant == 'gwm' else base)
    labels = dense.get_datasets()[-1]
    n_columns = None
    shape = {'n_unit': n_unit, 'n_layers': n_layers}
    if not variant.endswith('wle'):
        model = new_model(method, labels, **shape)
    else:
        with_atom = variant == 'wle'
        if with_atom not in sets:
            sets[with_atom] = data_sets.weisfeiler_lehman(dense, with_atom)
        found, n_labels = sets[with_atom]
        atoms, matrices, _ = dense.get_datasets()
        if with_atom:  # the labels replace the atoms
            dense = NumpyTupleDataset(found, matrices, labels)
            data = to_sparse(dense)
            model = new_model(method, labels, **shape, n_atom_types=n_labels)
        else:
            data = dense = NumpyTupleDataset(atoms, matrices, found, labels)
            n_columns = 1
            model = new_model(method, labels, **shape, n_wle_types=n_labels)
    model(*upstream_concat_mols([dense[0]]))  # to make all parameters
    converters = {
        layout: chainer_bspmm.CSRConverter(layout, n_node_columns=n_columns)
        for layout in ('folded', 'packed')
    }
    return Subject(model, dense, data, converters)


def of_kind(sets, read, method):
    """Return a method's data set, dense and sparse; from `sets` if it was made before."""
    method = {'mpnn': 'ggnn'}.get(method, method)
    kind = smiles.KINDS[preprocess_method_dict[method].__name__]
    if kind not in sets:
        sets[kind] = data_sets.of_smiles(*read, method=method)
    return sets[kind]


def new_model(method, labels, n_unit=N_UNIT, n_layers=N_LAYERS, **sizes):
    """Return Chainer Chemistry's dense model for labels (M, tasks), on the host.

    `sizes`: sizes of the embeddings, as in `set_up_predictor`.
    """
    numpy.random.seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        if method == 'mpnn':
            predictor = GraphConvPredictor(
                MPNN(n_unit, n_unit, n_layers, message_func='ggnn'), MLP(labels.shape[1], n_unit)
            )
        else:
            predictor = set_up_predictor(method, n_unit, n_layers, labels.shape[1], **sizes)
    kind, loss, metric = Regressor, functions.mean_squared_error, functions.mean_absolute_error
    if labels.dtype.kind == 'i':
        kind, loss = Classifier, functions.sigmoid_cross_entropy
        metric = functions.binary_accuracy
    return kind(predictor, lossfun=loss, metrics_fun=metric)


def argument_parser(doc, methods, device, device_help):
    """Return a parser with the options of all these benchmarks; the arguments are its defaults."""
    parser = harness.argument_parser(doc)
    parser.add_argument('--device', default=device, help=device_help)
    parser.add_argument('--tox21', help="MoleculeNet's tox21.csv.gz; default: generated ones")
    parser.add_argument('--methods', nargs='+', default=methods, choices=methods)
    parser.add_argument('--limit', type=int, help='largest number of molecules of a data set')
    return parser


def add_time(parser, default):
    """Add the option of benchmarks that end when time is up, and list the skipped measurements."""
    parser.add_argument(
        '--time',
        type=float,
        default=default,
        help='seconds of the whole run; measurements that do not fit are skipped and listed',
    )


def molecules(name, args):
    """Return SMILES, labels and a description of the data set that the arguments select."""
    if name == 'tox21':
        return data_sets.tox21(args.tox21, args.limit)
    return {'qm9': data_sets.qm9, 'nci': data_sets.nci}[name](args.limit)
