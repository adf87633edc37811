"""`run_node_classification_train`: upstream's function with captured steps."""

from collections.abc import Sequence
from typing import Any

import chainer
from chainer import training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.updaters import StandardUpdater
from chainer_chemistry.dataset.graph_dataset.base_graph_data import PaddingGraphData
from chainer_chemistry.dataset.graph_dataset.base_graph_data import SparseGraphData
from chainer_chemistry.training.extensions.auto_print_report import AutoPrintReport
import numpy

from chainer_bspmm.dataset.converters import CSRConverter
from chainer_bspmm.dataset.sparse_dataset import SparseDataset, to_sparse
from chainer_bspmm.models.node_classifier import NodeClassifier
from chainer_bspmm.sparse.build import to_host
from chainer_bspmm.training.graph_updater import GraphUpdater


def run_node_classification_train(
    model: NodeClassifier,
    data: Any,
    train_mask: Any,
    valid_mask: Any,
    epoch: int = 10,
    optimizer: chainer.Optimizer | None = None,
    out: str = 'result',
    extensions_list: Sequence[Any] | None = None,
    device: Any = -1,
    use_default_extensions: bool = True,
    resume_path: str | None = None,
) -> None:
    """Train a model of a single graph on the labels of some of its nodes.

    It replaces ``chainer_chemistry.utils.train_utils.run_node_classification_train`` for a swapped
    model, with the same arguments except ``converter``, which upstream ignores. On a GPU the graph
    stays there, and each step, which is an epoch, is one launch (:class:`GraphUpdater`).

    Args:
        model (NodeClassifier): a model from ``sparsify``, whose predictor takes the features and a
            BatchedCSR.
        data (SparseGraphData or PaddingGraphData): a single graph. ``adj`` of PaddingGraphData is
            an array or a CooMatrix. ``y``, (n_nodes,), are the labels. Types of edges are not used.
        train_mask, valid_mask (array): nodes to train on, and nodes to report on; (n_nodes,) bool,
            or (k,) integers, which are indices.
        epoch (int): number of steps.
        optimizer (chainer.Optimizer or None): None means Adam.
        out (str): folder of the Trainer.
        extensions_list (sequence or None): further extensions.
        device: as for ``chainer.get_device``.
        use_default_extensions (bool): whether to log and print, with a progress bar.
        resume_path (str or None): snapshot of a Trainer to resume from.

    Raises:
        TypeError: the model is not swapped, ``data`` is not graph data, or a mask has another
            dtype.
        ValueError: a label or a bool is missing, or an index is out of range; see also
            :func:`~chainer_bspmm.dataset.to_sparse`.
    """
    if not isinstance(model, NodeClassifier):
        text = 'model: expected the NodeClassifier of chainer_bspmm.sparsify(model), got %s.%s'
        raise TypeError(text % (type(model).__module__, type(model).__name__))
    dataset = _one_graph(data, train_mask=train_mask, valid_mask=valid_mask)
    optimizer = (optimizer or chainer.optimizers.Adam()).setup(model)
    device = chainer.get_device(device)
    converter = CSRConverter('packed', strip_padding=False)
    iterator = SerialIterator(dataset, 1)
    if device.xp is numpy:
        batch = converter(dataset)  # it is the same in every step
        updater = StandardUpdater(
            iterator, optimizer, converter=lambda examples, device: batch, device=device
        )
    else:
        updater = GraphUpdater(iterator, optimizer, converter=converter, device=device)
    trainer = training.Trainer(updater, (epoch, 'epoch'), out=out)
    if use_default_extensions:
        trainer.extend(extensions.LogReport())
        trainer.extend(AutoPrintReport())
        trainer.extend(extensions.ProgressBar(update_interval=10))
    for extension in extensions_list or ():
        trainer.extend(extension)
    if resume_path:
        chainer.serializers.load_npz(resume_path, trainer)
    trainer.run()


def _one_graph(data, **masks):
    """Return a `SparseDataset` of one graph, with its labels and node indices for each mask."""
    if not isinstance(data, (SparseGraphData, PaddingGraphData)):
        text = 'data: expected SparseGraphData or PaddingGraphData, got %s'
        raise TypeError(text % type(data).__name__)
    n_nodes = len(data.x)
    if data.y is None or numpy.shape(data.y) != (n_nodes,):
        got = 'None' if data.y is None else 'shape %s' % (numpy.shape(data.y),)
        raise ValueError('data.y: expected a label for each of %d nodes, got %s' % (n_nodes, got))
    nodes = [_indices(name, to_host(mask), n_nodes)[None] for name, mask in masks.items()]
    if not nodes[0].size:
        raise ValueError('train_mask: expected nodes to train on, got none')
    molecules = to_sparse([data]).molecules
    molecules.labels += nodes
    return SparseDataset(molecules)


def _indices(name, mask, n_nodes):
    """Return the indices of the nodes that a mask selects, (k,) int32, checked, on the host."""
    mask = numpy.asarray(mask)
    if mask.dtype == bool:
        if mask.shape != (n_nodes,):
            words = name, n_nodes, mask.shape
            raise ValueError('%s: expected a bool for each of %d nodes, got shape %s' % words)
        return numpy.flatnonzero(mask).astype(numpy.int32)
    if mask.dtype.kind not in 'iu' or mask.ndim != 1:
        words = name, mask.dtype, mask.shape
        text = '%s: expected bools or integers of one dimension, got %s of shape %s'
        raise TypeError(text % words)
    if mask.size and not 0 <= mask.min() <= mask.max() < n_nodes:
        wrong = mask.min() if mask.min() < 0 else mask.max()
        text = '%s: expected node indices in [0, %d), got %d'
        raise ValueError(text % (name, n_nodes, wrong))
    return mask.astype(numpy.int32)
