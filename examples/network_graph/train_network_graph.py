#!/usr/bin/env python
"""Classify the nodes of a citation network with a graph convolution over the whole network.

python train_network_graph.py                         # Cora if it is there, else generated
python train_network_graph.py --dataset citeseer --method gin --epoch 300 --device 0
"""

import os
import time

import network_data  # before common: puts its folder on sys.path
import chainer_bspmm
import chainer
import numpy
from chainer import serializers
from chainer.training import extensions
from chainer.utils import CooMatrix
from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.training import run_node_classification_train
from chainer_chemistry.dataset.graph_dataset.base_graph_data import PaddingGraphData
from chainer_chemistry.dataset.graph_dataset.base_graph_data import SparseGraphData
from chainer_chemistry.models.gin import GIN, GINSparse
from chainer_chemistry.models.prediction.node_classifier import NodeClassifier
from common import arguments, data, folder, training
from common.data import DataError
from sklearn.linear_model import LogisticRegression

METHODS = {'gin_sparse': GINSparse, 'gin': GIN}


def graph_data(network, method):
    """Return upstream's data of a network: a list of edges, or for GIN a CooMatrix."""
    if method == 'gin_sparse':
        return SparseGraphData(x=network.x, edge_index=network.edges, y=network.y)
    col, row = network.edges
    ones = numpy.ones(row.size, numpy.float32)
    n_nodes = len(network.y)
    return PaddingGraphData(x=network.x, adj=CooMatrix(ones, row, col, (n_nodes,) * 2), y=network.y)


@data.writing('into the folder of --out')
def run(argv=None):
    """Train, test, and write the model; return the exit status."""
    parser = arguments.make_parser('Classification of the nodes of a citation network.')
    parser.add_argument(
        '--dataset',
        choices=('auto', *network_data.CITATIONS, 'generated'),
        default='auto',
        help='cora, citeseer: where Chainer Chemistry keeps them; generated: not real; auto: '
        'cora if it is there, else generated',
    )
    _, group, *_ = arguments.add_model_arguments(parser, [*METHODS], 2, 32, 200, 0.2)
    group.add_argument(
        '--dropout', type=arguments.number(float, 0, 0.99), default=0.5, help='dropout ratio'
    )
    args = parser.parse_args(argv)
    device = arguments.use_device(args.device)
    folder.check(args.out, args.force)

    network = network_data.load(args.dataset, args.seed)
    x, y = network.x, network.y
    print('Data: %s' % network.description)
    sizes = len(y), y.max() + 1, network.edges.shape[1] // 2, x.shape[1]
    print('%d nodes of %d classes, %d edges, %d words' % sizes)
    parts = [numpy.sort(part) for part in data.split(y, dict(vars(args), split='random'))]
    train_part, validation_part, test_part = parts
    print('Split: %d training, %d validation, %d test' % tuple(map(len, parts)))
    if len(numpy.unique(y[train_part])) < 2:
        text = '--train-data-ratio: the training nodes are of one class, expected two or more'
        raise DataError(text)
    settings = dict(vars(args), script=os.path.basename(__file__), data=network.description)
    for name in ('out', 'device', 'force'):
        del settings[name]
    folder.start_run(args.out, settings, args.force)

    start = time.perf_counter()
    numpy.random.seed(args.seed)
    if device.xp is not numpy:
        device.xp.random.seed(args.seed)  # layers without an input size draw weights on the device
    graph_convolution = METHODS[args.method](
        out_dim=None,  # it belongs to the readout, which nodes do not need
        node_embedding=True,
        hidden_channels=args.unit_num,
        out_channels=int(y.max()) + 1,
        n_update_layers=args.conv_layers,
        dropout_ratio=args.dropout,
    )
    model = chainer_bspmm.sparsify(NodeClassifier(graph_convolution))
    graph = graph_data(network, args.method)
    every = max(args.epoch // 10, 1), 'epoch'
    names = [
        'main/%s(%s)' % (name, of) for name in ('loss', 'accuracy') for of in ('train', 'valid')
    ]
    reports = [
        extensions.LogReport(trigger=every),
        extensions.PrintReport(['epoch', *names, 'elapsed_time'], out=training.PlainText()),
    ]
    run_node_classification_train(
        model,
        graph,
        train_part,
        validation_part,
        epoch=args.epoch,
        out=args.out,
        device=device,
        use_default_extensions=False,
        extensions_list=reports,
    )
    batch_x, adj, _ = chainer_bspmm.CSRConverter('packed')(to_sparse([graph]), device)
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        scores = chainer.backends.cuda.to_cpu(model.predictor(batch_x, adj).array)
    seconds = time.perf_counter() - start

    regression = LogisticRegression(max_iter=1000).fit(x[train_part], y[train_part])
    answers = {
        'graph convolution': scores.argmax(axis=1),
        'logistic regression of the words, without edges': regression.predict(x),
        'always the largest class': numpy.bincount(y[train_part]).argmax(),
    }
    found = {name: float((answer == y)[test_part].mean()) for name, answer in answers.items()}
    print('\nShare of the %d test nodes that are classified right:' % len(test_part))
    for name, share in found.items():
        print('%6.1f %%  %s' % (100 * share, name))
    print('%.1f s for %d epochs and the prediction' % (seconds, args.epoch))
    path = os.path.join(args.out, folder.MODEL_FILE)
    with data.replacing(path) as new:
        serializers.save_npz(new, model)
    print('Model: %s' % path)
    result = {'settings': settings, 'test': found}
    folder.write_json(os.path.join(args.out, 'result.json'), result)
    return 0


if __name__ == '__main__':
    training.main(run)
