"""Applying nodes inside of a backward pass, where often nobody will differentiate again."""
import chainer


def quick_apply(node, inputs):
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


class QuickSums:
    """Mixin of nodes whose inputs are used again and again, as the parameters of tied layers.

    Where no graph of the gradients is built, they are added without a node for every sum.
    """

    def backward_accumulate(self, target_input_indexes, grad_outputs, grad_inputs):
        gradients = self.backward(target_input_indexes, grad_outputs)
        if chainer.config.enable_backprop:
            return tuple(new if old is None else old + new
                         for old, new in zip(grad_inputs, gradients))
        return tuple(
            new if old is None else chainer.Variable(old.array + new.array, requires_grad=False)
            for old, new in zip(grad_inputs, gradients))
