"""Base classes of the package's nodes: backward passes without bookkeeping.

Primitives (products, segment reductions) are differentiated by each other's nodes. All other nodes
are :class:`FusedNode`.
"""

from collections.abc import Callable
import operator
from typing import Any

import chainer
from chainer import function_node, functions

from chainer_bspmm.cuda import step
from chainer_bspmm.sparse import check


def apply_untracked(node, inputs):
    """Apply a fresh node; where no graph of the gradients is built, only run its ``forward``.

    The node's type check, hooks and records, about 10 us, would be wasted then.
    """
    if chainer.config.enable_backprop:
        return node.apply(inputs)
    outputs = node.forward(tuple(variable.array for variable in inputs))
    return [chainer.Variable(array, requires_grad=False) for array in outputs]


class AccumulateInPlace:
    """Mixin for shared inputs, such as tied parameters: no node for each sum of gradients."""

    backward: Callable

    def backward_accumulate(self, target_input_indexes, grad_outputs, grad_inputs):
        gradients = self.backward(target_input_indexes, grad_outputs)
        add = operator.add if chainer.config.enable_backprop else _accumulated
        return tuple(
            new if old is None else old if new is None else add(old, new)
            for old, new in zip(grad_inputs, gradients)
        )


class AccumulateInLaunch(AccumulateInPlace):
    """Mixin: the launch of ``_layer`` also adds ``_more``, the gradient accumulated so far.

    It does so for the first input only. ``_layer`` is None if no launch does the node.
    """

    inputs: tuple
    _layer: Any
    _more = None

    def backward_accumulate(self, target_input_indexes, grad_outputs, grad_inputs):
        first = grad_inputs[0]
        if (
            self._layer is not None
            and first is not None
            and first.dtype == self.inputs[0].dtype
            and target_input_indexes[0] == 0
            and not chainer.config.enable_backprop
        ):
            self._more = first.array
            sums = _pending_sums()
            if sums is not None:  # the gradient may be a pending sum, which is about to be read
                sums.settle(first.array)
            grad_inputs = None, *grad_inputs[1:]
        try:
            return super().backward_accumulate(target_input_indexes, grad_outputs, grad_inputs)
        finally:
            self._more = None


def _pending_sums():
    current = step.current()
    return None if current is None else current.sums


def _accumulated(old, new):
    """Return the sum of two gradients of one variable; in a step they may be deferred."""
    sums = _pending_sums()
    if sums is not None:
        if sums.chain(old.array, new.array):
            return old
        sums.settle(old.array)
        sums.settle(new.array)
    return chainer.Variable(old.array + new.array, requires_grad=False)


class FusedNode(function_node.FunctionNode):
    """A node of one output that combines several operations.

    First derivatives are calculated on bare arrays, higher ones, which are rare, come from the same
    formula in other nodes. A subclass defines

    - ``_output(inputs)``: the output, an array; it may keep others as attributes.
    - ``_gradients(inputs, gy, indexes)``: arrays of any dtype, a sequence or a dict by the index of
      the input; needed are those of `indexes`.
    - ``_composed(*variables)``: the output, from nodes that are differentiable to any order.
    """

    _output: Callable
    _gradients: Callable
    _composed: Callable

    def forward(self, inputs):
        self.retain_inputs(tuple(range(len(inputs))))
        y = self._output(inputs)
        self._result = y.dtype, y.shape, type(y)
        return (y,)

    def backward(self, indexes, grad_outputs):
        check.gradient(grad_outputs[0].array, self._result)
        inputs = self.get_retained_inputs()
        if chainer.config.enable_backprop:
            # A variable may be given twice; each use has a gradient.
            inputs = [functions.identity(variable) for variable in inputs]
            return tuple(
                chainer.grad(
                    [self._composed(*inputs)],
                    [inputs[i] for i in indexes],
                    grad_outputs,
                    enable_double_backprop=True,
                )
            )
        arrays = [variable.array for variable in inputs]
        gradients = self._gradients(arrays, grad_outputs[0].array, indexes)
        return tuple(
            chainer.Variable(gradients[i].astype(arrays[i].dtype, copy=False), requires_grad=False)
            for i in indexes
        )
