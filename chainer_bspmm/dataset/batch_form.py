"""Descriptions of a batch's arrays: `Capacity` has their sizes, `Form` everything else."""

import collections
from typing import Any

from chainer_bspmm.cuda import plans
from chainer_bspmm.sparse import BatchedCSR
from chainer_bspmm.sparse.batched_csr import Buffers

# Sizes of the buffers of a batch.
Capacity = collections.namedtuple('Capacity', 'rows entries max_rows max_entries max_atom_id')

# Together with a `Capacity` this determines the shape and dtype of each array of a batch. atoms and
# each item of labels: (dtype, shape of a row); data: dtype or None; longest, layout, padded_to: see
# `BatchedCSR`. The first n_node_columns labels have a row for each node.
Form = collections.namedtuple(
    'Form',
    'n_graphs n_relations is_symmetric atoms data labels longest layout padded_to n_node_columns',
    defaults=('packed', None, 0),
)


def needs(sizes, entries, max_atom_id):
    """Return the smallest `Capacity` for molecules of these sizes and numbers of entries."""
    return Capacity(
        rows=int(sizes.sum()),
        entries=int(entries.sum()),
        max_rows=int(sizes.max(initial=0)),
        max_entries=int(entries.max(initial=0)),
        max_atom_id=-1 if max_atom_id is None else max_atom_id,
    )


def kinds_of(atoms, data, labels) -> tuple[tuple, Any, tuple]:
    """Return the fields atoms, data and labels of a `Form` for these arrays."""
    atoms, *labels = [(array.dtype, array.shape[1:]) for array in (atoms, *labels)]
    return atoms, None if data is None else data.dtype, tuple(labels)


def rounded(longest):
    """Round the length of a batch's longest row up to a bound that most batches share."""
    return max(plans.LONG_ROW, 1 << (longest - 1).bit_length())


def batch_arrays(form, capacity):
    """Return name -> (shape, dtype) of the arrays of a batch; labels are ``label_0`` and so on."""
    dtype, tail = form.atoms
    arrays = {
        'row_offsets': ((form.n_graphs + 1,), 'i4'),
        'col_offsets': ((form.n_graphs + 1,), 'i4'),
        'indptr': ((capacity.rows + 1,), 'i4'),
        'indices': ((capacity.entries,), 'i4'),
        'atoms': ((capacity.rows,) + tail, dtype),
    }
    if form.data is not None:
        arrays['data'] = (capacity.entries,), form.data
    if form.layout == 'folded':
        arrays['row_weights'] = (capacity.rows,), 'f4'
    for i, (dtype, tail) in enumerate(form.labels):
        n_rows = capacity.rows if i < form.n_node_columns else form.n_graphs
        arrays['label_%d' % i] = (n_rows,) + tail, dtype
    return arrays


def new_buffers(make, form, capacity):
    """Return the `Buffers` of a batch, each made by ``make(shape, dtype)``."""
    arrays = batch_arrays(form, capacity)
    return buffers_of({name: make(shape, dtype) for name, (shape, dtype) in arrays.items()})


def buffers_of(arrays):
    """Return the `Buffers` of arrays that are named as :func:`batch_arrays` names them."""
    labels = [array for name, array in arrays.items() if name.startswith('label_')]
    names = [name for name in Buffers._fields if name != 'labels']
    return Buffers(labels=labels, **{name: arrays.get(name) for name in names})


def batch_over(buffers, form, capacity, has_spare=True):
    """Make (atoms, BatchedCSR, label...) over buffers, without a copy; atoms are always rows."""
    tables = buffers._asdict()
    atoms, labels = tables.pop('atoms'), tables.pop('labels')
    adj = BatchedCSR.in_buffers(
        **tables,
        n_relations=form.n_relations,
        max_rows=capacity.max_rows,
        max_nnz=capacity.max_entries,
        max_atom_id=None if capacity.max_atom_id < 0 else capacity.max_atom_id,
        is_symmetric=form.is_symmetric,
        has_spare=has_spare,
        layout='unfolded' if form.layout == 'padded' else form.layout,
        padded_to=form.padded_to,
        longest=form.longest,
    )
    return (atoms, adj, *labels)
