"""Repairs of ChainerMN for several ranks, in effect if `chainer_bspmm` is imported first.

A script that uses ChainerMN stays as it is. ChainerMN's functions are patched when ChainerMN is
imported, by the table of `compat.import_hooks`; until then nothing of it is loaded.
"""

from typing import TYPE_CHECKING

from chainer_bspmm.compat.import_hooks import repairs
from chainer_bspmm.compat.names_later import names_later


@repairs('chainermn.communicators')
def check_communicators(module):
    """Refuse communicators that would crash or hang; let a fault of one rank end all ranks."""
    from chainer_bspmm.multi_node import communicators

    module.create_communicator = communicators.checked(module.create_communicator)


@repairs('chainermn.optimizers')
def weight_ranks(module):
    """Weight gradients by molecules, start all ranks from one state, and refuse a loss of NaN."""
    from chainer_bspmm.multi_node import epochs, optimizer

    module.create_multi_node_optimizer = optimizer.weighted(
        module.create_multi_node_optimizer, module._MultiNodeOptimizer
    )
    epochs.check_updaters()


@repairs('chainermn.links.batch_normalization')
def count_rows(module):
    """Weight gradients through batch statistics by molecules, in captured steps as well."""
    import chainer

    from chainer_bspmm.multi_node import statistics

    kind = module.MultiNodeBatchNormalization
    call = kind.__call__

    def __call__(self, x, finetune=False):
        normalise = statistics.batch_norm_of_ranks if chainer.config.train else call
        return normalise(self, x, finetune)

    kind.__call__ = __call__
    kind.bspmm_ranks = property(statistics.ranks_of)  # read by `ops.batch_norm`


@repairs('chainermn.datasets.scatter')
def scatter_sparse(module):
    """Send each rank only its part of a sparse data set, as a `SparseDataset`."""
    from chainer_bspmm.multi_node import scatter

    module.scatter_dataset = scatter.sparse_too(module.scatter_dataset)


@repairs('chainermn.extensions.multi_node_evaluator')
def weight_evaluations(module):
    """Weight evaluations by molecules; compute ROC-AUC and the like over all ranks together."""
    from chainer_bspmm.multi_node import evaluators

    module.create_multi_node_evaluator = evaluators.create_multi_node_evaluator


@repairs('chainermn.extensions.checkpoint')
def keep_checkpoints(module):
    """Keep the snapshots of a Trainer that fails, which ChainerMN deletes."""

    def on_error(self, trainer, error, traceback):
        self.files = []
        self.path = self.path or trainer.out  # without it an assertion would hide the error

    module._MultiNodeCheckpointer.on_error = on_error


__all__ = ['PartIterator']


if TYPE_CHECKING:
    from chainer_bspmm.multi_node.epochs import PartIterator
else:
    __getattr__, __dir__ = names_later(__name__, {'PartIterator': 'epochs'})
