"""Backward passes without bookkeeping, where nobody will differentiate them again."""

import chainer
from chainer import function_node
from chainer import functions


def apply_untracked(node, inputs):
    """Apply a node; without its bookkeeping where no graph is being built.

    An ordinary backward pass builds no graph of the gradients. There a node's checks, hooks and
    records (about 10 us each) serve nobody, and its arithmetic is all that is done.

    Args:
        node (chainer.FunctionNode): fresh; forward must do without type check.
        inputs (sequence of Variable): on the current device.

    Returns:
        sequence of Variable: as from ``node.apply(inputs)``.
    """
    if chainer.config.enable_backprop:
        return node.apply(inputs)
    outputs = node.forward(tuple(variable.array for variable in inputs))
    return [chainer.Variable(array, requires_grad=False) for array in outputs]


class AccumulateInPlace:
    """Mixin of nodes whose inputs are used again and again, as the parameters of tied layers.

    Where no graph of the gradients is built, they are added without a node for every sum.
    """

    def backward_accumulate(self, target_input_indexes, grad_outputs, grad_inputs):
        gradients = self.backward(target_input_indexes, grad_outputs)
        if chainer.config.enable_backprop:
            return tuple(
                new if old is None else old + new for old, new in zip(grad_inputs, gradients)
            )
        return tuple(
            new if old is None else chainer.Variable(old.array + new.array, requires_grad=False)
            for old, new in zip(grad_inputs, gradients)
        )


class FusedNode(function_node.FunctionNode):
    """A node whose gradients are calculated on arrays, unless a graph of them is wanted.

    A subclass has one output, retains all of its inputs, and defines ``_gradients(arrays, gy)``,
    the gradients of all inputs as arrays, of any dtype; and ``_composed(*variables)``, its output
    from nodes that are differentiable to any order.
    """

    def backward(self, indexes, grad_outputs):
        inputs = self.get_retained_inputs()
        if chainer.config.enable_backprop:
            # Gradients of gradients are rare: they come from the same formula in other nodes. One
            # variable may be given twice: each use is one of its own.
            inputs = [functions.identity(variable) for variable in inputs]
            return tuple(
                chainer.grad(
                    [self._composed(*inputs)],
                    [inputs[i] for i in indexes],
                    grad_outputs,
                    enable_double_backprop=True,
                )
            )
        arrays = self._gradients([variable.array for variable in inputs], grad_outputs[0].array)
        return tuple(
            chainer.Variable(arrays[i].astype(inputs[i].dtype, copy=False), requires_grad=False)
            for i in indexes
        )
