"""The sum over all rows, which is the gradient of a bias."""

from chainer import function_node
from chainer import functions

from chainer_bspmm import backend


class RowSum(function_node.FunctionNode):
    """Compute ``y[c] = sum_i x[i, c]`` of (n_rows, n_channels) floats, see `backend.row_sum`."""

    def forward(self, inputs):
        (x,) = inputs
        self._shape = x.shape
        return (backend.row_sum(x),)

    def backward(self, indexes, grad_outputs):
        return (functions.broadcast_to(grad_outputs[0], self._shape),)
