"""ChainerMN on several ranks, as ``import chainermn`` gives it after `chainer_bspmm`.

A script stays that of ChainerMN. Its functions are patched when it is imported, by the table of
`compat.import_hooks`; until then nothing of it is loaded.
"""

from typing import TYPE_CHECKING

from chainer_bspmm.compat.import_hooks import repairs
from chainer_bspmm.compat.names_later import names_later


@repairs('chainermn.communicators')
def check_communicators(module):
    """Refuse calls that would crash or hang; let a fault of a rank end all."""
    from chainer_bspmm.multi_node import communicators

    module.create_communicator = communicators.checked(module.create_communicator)


@repairs('chainermn.optimizers')
def weight_ranks(module):
    """Weight gradients by molecules, start from one state without losing a step, notice NaN."""
    from chainer_bspmm.multi_node import epochs, optimizer

    module.create_multi_node_optimizer = optimizer.weighted(
        module.create_multi_node_optimizer, module._MultiNodeOptimizer
    )
    epochs.check_updaters()


@repairs('chainermn.links.batch_normalization')
def count_rows(module):
    """Weight gradients of statistics as `weight_ranks` does; let a CUDA graph contain them."""
    import chainer

    from chainer_bspmm.multi_node import statistics

    kind = module.MultiNodeBatchNormalization
    call = kind.__call__

    def __call__(self, x, finetune=False):
        normalise = statistics.batch_norm_of_ranks if chainer.config.train else call
        return normalise(self, x, finetune)

    kind.__call__ = __call__
    kind.bspmm_ranks = property(statistics.ranks_of)  # for `ops.batch_norm`, on graphs


@repairs('chainermn.datasets.scatter')
def scatter_sparse(module):
    """Send each rank its part of a sparse data set only, as a `SparseDataset`."""
    from chainer_bspmm.multi_node import scatter

    module.scatter_dataset = scatter.sparse_too(module.scatter_dataset)


@repairs('chainermn.extensions.multi_node_evaluator')
def weight_evaluations(module):
    """Weight evaluations by molecules; ROC-AUC and such are those of all ranks together."""
    from chainer_bspmm.multi_node import evaluators

    module.create_multi_node_evaluator = evaluators.create_multi_node_evaluator


@repairs('chainermn.extensions.checkpoint')
def keep_checkpoints(module):
    """chainermn/extensions/checkpoint.py: a Trainer that fails deletes its snapshots."""

    def on_error(self, trainer, error, traceback):
        self.files = []
        self.path = self.path or trainer.out  # asserted, which would hide the error

    module._MultiNodeCheckpointer.on_error = on_error


__all__ = ['PartIterator']


if TYPE_CHECKING:
    from chainer_bspmm.multi_node.epochs import PartIterator
else:
    __getattr__, __dir__ = names_later(__name__, {'PartIterator': 'epochs'})
