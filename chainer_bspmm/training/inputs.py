"""What a captured step reads: a batch of one layout at fixed places, and the number of the step."""

import chainer

from chainer_bspmm.cuda import gemm
from chainer_bspmm.cuda import step
from chainer_bspmm.training import staging


def blas_for(capturer, device):
    """Return a `Blas` of its own for what a capturer captures."""
    with chainer.using_device(device), capturer.stream:
        blas = gemm.Blas()
        blas.use(capturer.stream)
    return blas


class Inputs:
    """Hold batches of one layout, one at a time.

    Args:
        capturer (Capturer): of the step.
        blas ((cuda.gemm.Blas)), seed (int): of the step.
        device (chainer.backend.GpuDevice): where to.
        batch (HostBatch or DeviceBatch): the first of this layout.
        capacity (Capacity): of the buffers.
        n_numbers (int or None): so many float64 go along with every batch.

    Attributes:
        step ((cuda.step.Step)): to be under way when the step is run.
        numbers (array or None): (n_numbers,) float64 on the device.
    """

    def __init__(self, capturer, blas, seed, device, batch, capacity, n_numbers=None):
        self._capturer = capturer
        self._form, self._capacity = batch.form, capacity
        self._gather = batch.gather
        arrays = {'counter': ((1,), 'u8')}
        if n_numbers is not None:
            arrays['numbers'] = (n_numbers,), 'f8'
        arrays.update(batch.staged(capacity))
        self._staging = staging.Staging(arrays, device)
        buffers = sent = self._staging.device
        if self._gather is not None:
            with chainer.using_device(device):
                layout = staging.batch_arrays(self._form, capacity)
                buffers = {
                    name: device.xp.zeros(shape, dtype) for name, (shape, dtype) in layout.items()
                }
        self._buffers = staging.buffers_of(buffers)
        self.step = step.Step(blas, seed, sent['counter'])
        self.numbers = sent.get('numbers')

    def send(self, batch, counter, numbers=None):
        """Send a batch, the number of the step and the numbers that go along to the device."""
        views = self._staging.fill()
        views['counter'][0] = counter
        if numbers is not None:
            views['numbers'][...] = numbers
        batch.write(views)
        self._capturer.join()  # on another stream the last step may still read
        self._staging.send()

    def arrays(self):
        """Return what was sent, (atoms, BatchedCSR, label...).

        Where the batch is gathered on the device, launch that.
        """
        if self._gather is not None:
            self._gather(self._staging.device['index'], self._buffers)
        return staging.batch_over(self._buffers, self._form, self._capacity)
