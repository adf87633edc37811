"""Repairs of ChainerMN, which comes with Chainer 7.8.1 and needs mpi4py."""

import numpy

from chainer_bspmm.compat.import_hooks import repairs
from chainer_bspmm.compat.module_view import ModuleView


@repairs('chainermn.communicators._memory_utility')
def include_half(module):
    """chainermn/communicators/_memory_utility.py: kernels use ``half`` but do not include it."""
    # They rely on cupy/carray.cuh, which no longer defines it in CuPy 14.
    cuda = module.chainer.cuda

    def raw(code, name, *args, **kwargs):
        return cuda.raw('#include <cuda_fp16.h>\n' + code, name, *args, **kwargs)

    module.chainer = ModuleView(module.chainer, cuda=ModuleView(cuda, raw=raw))


@repairs('chainermn.communicators._memory_utility')
def unpack_with_conversion(module):
    """chainermn/communicators/_memory_utility.py: ``xp.array(..., copy=False)`` to convert."""
    # NumPy 2 and CuPy 14 refuse that call if the conversion needs a copy, as it does here.

    def unpack_params(params, attr_name, buffer, transfer_dtype, zero_fill, stream=None):
        offset = 0
        for param in params:
            array = getattr(param, attr_name)
            if array is None and attr_name == 'grad' and zero_fill:
                array = param.xp.empty_like(param.data)
                setattr(param, attr_name, array)
            same_dtype = array.dtype == transfer_dtype
            received = array if same_dtype else array.astype(transfer_dtype)
            size = array.size * numpy.dtype(transfer_dtype).itemsize
            buffer.to_device(received, size, offset, stream)
            offset += size
            if not same_dtype:
                # Into the existing array: a ChainerX parameter does not accept another one.
                getattr(param, attr_name)[...] = received.astype(array.dtype)

    module.unpack_params = unpack_params
