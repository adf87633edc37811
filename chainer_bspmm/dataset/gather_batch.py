"""A batch of molecules of a data set on a GPU, gathered there: kernels/gather_batch.cu."""

import collections
import math

import numpy

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda.launch import device_of, run
from chainer_bspmm.cuda.plans import kept, Launch, WARP

GATHER_WARPS, MAX_GATHER_WARPS = 8, 16  # of a block
GATHER_BLOCKS_PER_SM = 2  # each adds up the sizes of the whole batch


@kept
def gather_launch(n_graphs, device) -> Launch:
    """Plan a warp per graph of gather_batch, or per several graphs if that made too many blocks."""
    most = GATHER_BLOCKS_PER_SM * device.n_sms
    graphs_per_block = max(GATHER_WARPS, -(-n_graphs // most))
    warps = min(graphs_per_block, MAX_GATHER_WARPS)
    return Launch(
        (('VECTOR', 1),),
        (-(-n_graphs // graphs_per_block), 1, 1),
        (warps * WARP, 1, 1),
        0,
        (numpy.int32(n_graphs), numpy.int32(graphs_per_block)),
    )


# The arrays of a data set's molecules on a device, as kernels/gather_batch.cu takes them; data may
# be None, labels is a list of arrays (M, ...), n_relations an int.
Source = collections.namedtuple(
    'Source', 'starts entry_starts atoms row_starts columns data labels n_relations'
)


def gather_batch(source, index, buffers, padded_to=None):
    """Write a packed or folded batch of molecules of a data set on a GPU into buffers there.

    One launch, and another for every two labels after the first two. Nothing is checked: `index`,
    (n_graphs,) int32, names molecules; buffers are C-contiguous, of its dtypes, and have a row more
    for each molecule and row_weights if `padded_to`, (1,) int32 on the device, says that the batch
    is folded. What is larger becomes spare.
    """
    pairs = [(label, out, _item_bytes(out)) for label, out in zip(source.labels, buffers.labels)]
    with device_of(index):
        plan = gather_launch(index.size, kernels.device(index.data.device_id))
        n_rows = buffers.indptr.size - 1
        n_entries = buffers.indices.size
        data_bytes = 0 if source.data is None else source.data.itemsize
        sizes = n_rows, n_entries, source.n_relations, _item_bytes(source.atoms), data_bytes
        for first in range(0, max(len(pairs), 1), 2):
            labels, outs, label_bytes = zip(*(pairs[first : first + 2] + 2 * [(None, None, 0)])[:2])
            run(
                'gather_batch',
                index,
                plan,
                index,
                *source[:-2],
                *labels,
                padded_to,
                *buffers[:-1],
                *outs,
                numbers=map(numpy.int32, (*sizes, *label_bytes)),
                storage='f',
                LABELS_ONLY=first > 0,
                FOLDED=padded_to is not None,
            )


def _item_bytes(array):
    """Return the bytes of one row of an array."""
    return array.itemsize * math.prod(array.shape[1:])
