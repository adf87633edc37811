"""Base classes of the package's nodes: backward passes without bookkeeping.

The gradients of primitives (products, segment reductions) consist of other primitives. All other
nodes derive from :class:`FusedNode`.
"""

from collections.abc import Callable
import operator
from typing import Any

import chainer
from chainer import function_node, functions

from chainer_bspmm.cuda import step
from chainer_bspmm.sparse import check


def apply_untracked(node, inputs):
    """Apply a new node; if no graph is built for the gradients, only run its ``forward``.

    That saves the node's type check, hooks and records, about 10 us.
    """
    if chainer.config.enable_backprop:
        return node.apply(inputs)
    outputs = node.forward(tuple(variable.array for variable in inputs))
    return [chainer.Variable(array, requires_grad=False) for array in outputs]


class AccumulateInPlace:
    """Mixin that adds up the gradients of shared inputs, such as tied parameters, without nodes."""

    backward: Callable

    def backward_accumulate(self, target_input_indexes, grad_outputs, grad_inputs):
        gradients = self.backward(target_input_indexes, grad_outputs)
        add = operator.add if chainer.config.enable_backprop else _accumulated
        return tuple(
            new if old is None else old if new is None else add(old, new)
            for old, new in zip(grad_inputs, gradients)
        )


class AccumulateInLaunch(AccumulateInPlace):
    """Mixin: ``_gradients`` also adds ``_more``, the gradient accumulated so far, if there is one.

    It does so for the first input only, and where ``_adds_more`` is True.
    """

    inputs: tuple
    _adds_more: bool
    _more: Any = None

    def backward_accumulate(self, target_input_indexes, grad_outputs, grad_inputs):
        first = grad_inputs[0]
        if (
            self._adds_more
            and first is not None
            and first.dtype == self.inputs[0].dtype
            and target_input_indexes[0] == 0
            and not chainer.config.enable_backprop
        ):
            self._more = first.array
            sums = _pending_sums()
            if sums is not None:  # the gradient may be a deferred sum, and the launch reads it
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
    """Return the sum of two gradients of one variable, which may be deferred in a captured step."""
    sums = _pending_sums()
    if sums is not None:
        if sums.chain(old.array, new.array):
            return old
        sums.settle(old.array)
        sums.settle(new.array)
    return chainer.Variable(old.array + new.array, requires_grad=False)


class FusedNode(function_node.FunctionNode):
    """A node of one output that combines several operations.

    First derivatives are calculated on bare arrays. Higher ones are rare, and come from the same
    formula in other nodes. A subclass defines

    - ``_output(inputs)``, which returns the output, an array. It may store others as attributes.
    - ``_gradients(inputs, gy, indexes)``, which returns gradients of any dtype, as a sequence or a
      dict, by the index of the input. Only the gradients of `indexes` are needed.
    - ``_composed(*variables)``, which returns the output from nodes that are differentiable to any
      order.
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
            # A variable may be several inputs, and each needs a separate gradient.
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
