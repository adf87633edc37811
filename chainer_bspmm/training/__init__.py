"""Training: steps captured in CUDA graphs."""
from chainer_bspmm.training.graph_updater import GraphUpdater

__all__ = ['GraphUpdater']
