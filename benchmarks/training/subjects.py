"""The models of the benchmarks of training and prediction, and the arguments that choose them."""

import contextlib
import io

import chainer_bspmm  # noqa: F401  first: repairs Chainer
import chainer
from chainer import functions
from chainer_chemistry.dataset.converters import concat_mols as upstream_concat_mols
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict
from chainer_chemistry.models.mlp import MLP
from chainer_chemistry.models.mpnn import MPNN
from chainer_chemistry.models.prediction import Classifier
from chainer_chemistry.models.prediction import GraphConvPredictor
from chainer_chemistry.models.prediction import Regressor
from chainer_chemistry.models.prediction import set_up_predictor
import numpy

from benchmarks import data_sets
from benchmarks import harness
from chainer_bspmm.dataset import smiles

FIVE = ('rsgcn', 'relgcn', 'ggnn', 'gin', 'nfp')
METHODS = (*FIVE, 'relgat', 'gnnfilm')
N_UNIT, N_LAYERS = 64, 4

# Contenders are Chainer's own classes where they are called so.
vars(chainer.global_config)['bspmm_capture'] = False

UPSTREAM, GEOMETRIC = 'upstream dense', 'PyTorch Geometric'

MIN_ROUNDS, MAX_ROUNDS = 3, 30


def upstream_model(method, labels, examples, **sizes):
    """Return Chainer Chemistry's dense model on the host, with all parameters initialized.

    Args:
        method (str): of `set_up_predictor`, or ``'mpnn'``, with the messages of GGNN.
        labels (array): (M, tasks) of the data set.
        examples (list): a dense batch.
        **sizes: of the embeddings, as in `set_up_predictor`.
    """
    numpy.random.seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        if method == 'mpnn':
            predictor = GraphConvPredictor(
                MPNN(N_UNIT, N_UNIT, N_LAYERS, message_func='ggnn'), MLP(labels.shape[1], N_UNIT)
            )
        else:
            predictor = set_up_predictor(method, N_UNIT, N_LAYERS, labels.shape[1], **sizes)
    if labels.dtype.kind == 'i':
        model = Classifier(
            predictor,
            lossfun=functions.sigmoid_cross_entropy,
            metrics_fun=functions.binary_accuracy,
        )
    else:
        model = Regressor(
            predictor,
            lossfun=functions.mean_squared_error,
            metrics_fun=functions.mean_absolute_error,
        )
    model(*upstream_concat_mols(examples))
    return model


def of_kind(sets, read, method):
    """Return a method's data set, dense and sparse, from `sets` where one like it was made."""
    kind = smiles.KINDS[preprocess_method_dict[method].__name__]
    if kind not in sets:
        sets[kind] = data_sets.of_smiles(*read, method=method)
    return sets[kind]


def argument_parser(doc, methods, device, device_help):
    """Return a parser with the options of all these benchmarks; the arguments are defaults."""
    parser = harness.argument_parser(doc)
    parser.add_argument('--device', default=device, help=device_help)
    parser.add_argument('--tox21', help="MoleculeNet's tox21.csv.gz")
    parser.add_argument('--methods', nargs='+', default=methods, choices=methods)
    parser.add_argument('--limit', type=int, help='largest number of molecules of a data set')
    return parser


def step_argument_parser(doc, methods, batches, seconds, device, device_help):
    """Return :func:`argument_parser` with the options of a benchmark of training steps.

    Without ``--tox21`` molecules of its sizes are generated.
    """
    parser = argument_parser(doc, methods, device, device_help)
    parser.add_argument('--data', nargs='+', default=['tox21', 'qm9'], choices=['tox21', 'qm9'])
    parser.add_argument('--batches', nargs='+', type=int, default=batches)
    parser.add_argument(
        '--seconds',
        type=float,
        default=seconds,
        help='for each method, data set and batch size: from %d to %d rounds'
        % (MIN_ROUNDS, MAX_ROUNDS),
    )
    return parser


def molecules(name, args):
    """Return SMILES, labels and a description of a data set as the arguments ask."""
    if name == 'tox21':
        return data_sets.tox21(args.tox21, args.limit)
    return {'qm9': data_sets.qm9, 'nci': data_sets.nci}[name](args.limit)
