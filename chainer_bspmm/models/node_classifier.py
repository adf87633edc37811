"""Classification of the nodes of a single graph."""

from typing import Any

import chainer
from chainer import reporter
from chainer_chemistry.dataset.graph_dataset.base_graph_data import BaseGraphData
from chainer_chemistry.models.prediction import node_classifier

from chainer_bspmm.links.sparse import Sparse
from chainer_bspmm.sparse import BatchedCSR


class NodeClassifier(Sparse, node_classifier.NodeClassifier):
    """Train a model of a single graph on some of its nodes, and report metrics on others.

    Arguments, attributes and the reported ``loss(train)``, ``accuracy(train)``, ``loss(valid)``,
    ... are upstream's. The predictor is called with the features of the nodes and the matrix, so it
    needs no wrapper that takes them out of upstream's data.
    ``training.run_node_classification_train`` makes the batch.
    """

    def __call__(self, x, *args):
        if isinstance(x, BaseGraphData):
            raise TypeError(
                'x: expected features of nodes, followed by a BatchedCSR, got a %s: use '
                'chainer_bspmm.training.run_node_classification_train' % type(x).__name__
            )
        return super().__call__(x, *args)

    def forward(self, x: Any, adj: BatchedCSR, t: Any, train: Any, valid: Any) -> chainer.Variable:
        """Return the result of ``lossfun`` for the training nodes.

        Args:
            x (array), adj (BatchedCSR): a single graph, in the form that the predictor takes. The
                predictor returns (n_nodes, n_classes) or (1, n_nodes, n_classes).
            t (array): (n_nodes,) or (1, n_nodes), labels of all nodes.
            train, valid (array): indices of nodes, (k,) or (1, k) integers, or a bool for each
                node. With bools CuPy asks the device how many are True, so such a step cannot be
                captured.
        """
        self.metrics = None
        self.y = self.predictor(x, adj)
        if self.y.ndim == 3:
            self.y = self.y[0]
        self.train_loss, self.train_metrics = self._of(train, t, 'train')
        self.valid_loss, self.valid_metrics = self._of(valid, t, 'valid')
        for part, loss in (('train', self.train_loss), ('valid', self.valid_loss)):
            reporter.report({'loss(%s)' % part: self._convert_to_scalar(loss)}, self)
        reporter.report({**self.train_metrics, **self.valid_metrics}, self)
        return self.train_loss

    def _of(self, nodes, t, part):
        """Return the loss of some nodes, and their metrics by name."""
        nodes = nodes.ravel()
        y, t = self.y[nodes], t.ravel()[nodes]
        metrics = {}
        if self.compute_metrics:
            metrics = {
                '%s(%s)' % (name, part): self._convert_to_scalar(function(y, t))
                for name, function in self.metrics_fun.items()
            }
        return self.lossfun(y, t), metrics
