"""Repairs of Chainer 7.8.1."""

import functools
import types

import numpy

from chainer_bspmm.compat.import_hooks import repairs
from chainer_bspmm.compat.module_view import ModuleView, give_back_numpy_names, lost_numpy_names


NO_GPU = (
    'A GPU needs CuPy; `python -m chainer_bspmm info` says how to install it. Without a GPU the '
    'device is -1'
)


@repairs('chainer.functions.array.as_strided')
def as_strided_reads_sctypes(module):
    """chainer/functions/array/as_strided.py: backward reads numpy.sctypes (gone in NumPy 2)."""
    give_back_numpy_names(module, 'np', 'sctypes')


@repairs('chainer.functions.array.resize_images')
def resize_images_reads_float(module):
    """chainer/functions/array/resize_images.py: numpy.float (gone in NumPy 1.24)."""
    # Only this one function gets the view: others in the module compare ``xp is numpy``.
    lost = lost_numpy_names('float')
    if lost:
        module.compute_indices_and_weights = types.FunctionType(
            module.compute_indices_and_weights.__code__,
            {**vars(module), 'numpy': ModuleView(numpy, **lost)},
        )


@repairs('chainer.distributions.categorical')
def categorical_reads_lists_of_a_mesh(module):
    """chainer/distributions/categorical.py: adds a list to a mesh (a tuple in NumPy 2)."""

    def meshgrid(*axes, **kwds):
        return list(numpy.meshgrid(*axes, **kwds))

    module.numpy = ModuleView(numpy, meshgrid=meshgrid)


@repairs('chainer.dataset.convert')
def pad_without_positional_out(module):
    """chainer/dataset/convert.py: numpy.maximum with its output given by position."""
    # NumPy 2.4 warns about that once per molecule; chainer_chemistry's concat_mols does it, too.

    def concat_arrays_with_padding(arrays, padding):
        shapes = [array.shape for array in arrays]
        if len(set(map(len, shapes))) > 1:
            raise ValueError('padding: expected arrays of equal ndim, got shapes %s' % shapes)
        shape = numpy.max(shapes, axis=0)
        device = module.backend.get_device_from_array(arrays[0])
        with module.chainer.using_device(device):
            result = device.xp.full((len(arrays), *map(int, shape)), padding, dtype=arrays[0].dtype)
            for i, array in enumerate(arrays):
                result[(i, *map(slice, array.shape))] = array
        return result

    module._concat_arrays_with_padding = concat_arrays_with_padding


@repairs('chainer.backends.cuda')
def expect_no_cudnn(module):
    """chainer/backends/cuda.py: warns that cuDNN is not enabled, though CuPy 14 cannot have it."""
    # With an earlier CuPy, for which cuDNN can be installed, the warning stays.
    if module.available and not module.cudnn_enabled and module._cupy_major >= 14:
        module.check_cuda_available._already_warned = True


@repairs('chainer.backends.cuda')
def say_what_a_gpu_needs(module):
    """chainer/backends/cuda.py: the error for a missing CuPy names a page that no longer helps."""
    if module.available:
        return
    check = module.check_cuda_available

    @functools.wraps(check)
    def check_cuda_available():
        try:
            check()
        except RuntimeError as error:
            raise RuntimeError('%s. %s' % (error, NO_GPU)) from None

    module.check_cuda_available = check_cuda_available


@repairs('chainer.optimizer')
def resume_without_state_of_unused_parameters(module):
    """chainer/optimizer.py: demands an optimizer state of parameters that never had one."""
    # A parameter without a shape that no forward pass uses (``first_mlp`` of a GIN trained without
    # chainer_bspmm, parts of WeaveNet) is saved without a state; resuming then raises KeyError. A
    # disabled update rule needs no state, so the rules of such parameters are disabled while they
    # load.
    serialize = module.Optimizer.serialize

    @functools.wraps(serialize)
    def serialize_leniently(self, serializer):
        rules = [
            param.update_rule
            for param in self.target.params()
            if param.array is None and param.update_rule is not None and param.update_rule.enabled
        ]
        for rule in rules:
            rule.enabled = False
        try:
            serialize(self, serializer)
        finally:
            for rule in rules:
                rule.enabled = True

    module.Optimizer.serialize = serialize_leniently


@repairs('chainer.training.triggers.interval_trigger')
def triggers_ask_once(module):
    """chainer/training/triggers/interval_trigger.py: asks the updater for its epoch three times."""
    # A Trainer calls a trigger for every extension after every step.

    def call(self, trainer):
        updater = trainer.updater
        iteration = updater.iteration
        epoch = getattr(updater, 'epoch_detail', None)
        if self.unit == 'epoch':
            now, before = epoch, self._previous_epoch_detail
            if before < 0:  # a snapshot without this value was loaded
                before = updater.previous_epoch_detail
            self.count = now // self.period
        else:
            now, before = iteration, self._previous_iteration
            if before < 0:
                before = now - 1
        self._previous_iteration = iteration
        if epoch is not None:
            self._previous_epoch_detail = epoch
        return before // self.period != now // self.period

    module.IntervalTrigger.__call__ = functools.wraps(module.IntervalTrigger.__call__)(call)
