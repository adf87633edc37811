"""Gather a batch of molecules from a data set on a GPU: kernels/gather_batch.cu."""

import collections
import math

import numpy

from chainer_bspmm.cuda import kernels
from chainer_bspmm.cuda.launch import device_of, run
from chainer_bspmm.cuda.plans import kept, Launch, WARP

GATHER_WARPS, MAX_GATHER_WARPS = 8, 16  # least and most warps of a block
GATHER_BLOCKS_PER_SM = 2  # at most, because each block adds up the sizes of the whole batch


@kept
def gather_launch(n_graphs, device) -> Launch:
    """Plan gather_batch: a warp per graph, or per several graphs to limit the number of blocks."""
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

# values: labels of all molecules; out: array for the batch's labels; n_bytes: size of one label.
_Label = collections.namedtuple('_Label', 'values out n_bytes')
_NO_LABEL = _Label(None, None, 0)


def gather_batch(source, index, buffers, padded_to=None):
    """Write a packed or folded batch of molecules of a data set on a GPU into buffers there.

    One launch, and another for every two labels after the first two. Nothing is checked: `index`,
    (n_graphs,) int32, names molecules of the data set; buffers are C-contiguous and of its dtypes.
    With `padded_to`, (1,) int32 on the device, which is read when the launch runs, the batch is
    folded: then the buffers have one more row for each molecule, and row_weights. The parts of the
    buffers that the batch does not fill become spare.
    """
    labels = [
        _Label(values, out, _item_bytes(out)) for values, out in zip(source.labels, buffers.labels)
    ]
    # A launch takes two labels.
    labels += [_NO_LABEL] * (len(labels) % 2 if labels else 2)
    sizes = (
        buffers.indptr.size - 1,
        buffers.indices.size,
        source.n_relations,
        _item_bytes(source.atoms),
        0 if source.data is None else source.data.itemsize,
    )
    with device_of(index):
        plan = gather_launch(index.size, kernels.device(index.data.device_id))
        for i in range(0, len(labels), 2):
            first, second = labels[i : i + 2]
            run(
                'gather_batch',
                index,
                plan,
                index,
                source.starts,
                source.entry_starts,
                source.atoms,
                source.row_starts,
                source.columns,
                source.data,
                first.values,
                second.values,
                padded_to,
                buffers.atoms,
                buffers.indptr,
                buffers.indices,
                buffers.data,
                buffers.row_offsets,
                buffers.col_offsets,
                buffers.row_weights,
                first.out,
                second.out,
                numbers=map(numpy.int32, (*sizes, first.n_bytes, second.n_bytes)),
                storage='f',
                LABELS_ONLY=i > 0,
                FOLDED=padded_to is not None,
            )


def _item_bytes(array):
    """Return the bytes of one row of an array."""
    return array.itemsize * math.prod(array.shape[1:])
