"""Training, evaluation and prediction by steps that are captured in CUDA graphs."""

from chainer_bspmm.training.captured_predict import captured_predict, Predictions
from chainer_bspmm.training.check_swap import check_swap, SwapCheck
from chainer_bspmm.training.graph_updater import GraphUpdater
from chainer_bspmm.training.node_classification import run_node_classification_train
from chainer_bspmm.training.program import StepDiffers

__all__ = [
    'GraphUpdater',
    'Predictions',
    'StepDiffers',
    'SwapCheck',
    'captured_predict',
    'check_swap',
    'run_node_classification_train',
]
