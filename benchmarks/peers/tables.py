"""Tables of pointers and sizes, which a batched method moves to the device in every call."""

import cupy
import numpy

HOST_TO_DEVICE = 1


class Tables:
    """Hold one-dimensional tables in page-locked host memory and, as `device`, on the device."""

    def __init__(self, tables):
        self._host = []
        for table in tables:
            memory = cupy.cuda.alloc_pinned_memory(table.nbytes)
            host = numpy.frombuffer(memory, table.dtype, table.size)
            host[...] = table
            self._host.append(host)
        self.device = [cupy.asarray(table) for table in tables]

    def move(self):
        """Copy every table to the device, one asynchronous copy each, on the current stream."""
        stream = cupy.cuda.get_current_stream().ptr
        for host, device in zip(self._host, self.device):
            cupy.cuda.runtime.memcpyAsync(
                device.data.ptr, host.ctypes.data, host.nbytes, HOST_TO_DEVICE, stream
            )
