"""Molecules of every kind, for the tests of what gathers batches from them."""

import numpy

from chainer_bspmm.dataset.molecules import Molecules

# Molecule 0 is the largest, 2 and 6 have no node, 1 and 4 are lone.
SIZES = (37, 1, 0, 5, 1, 12, 0, 4)

LABELS = {
    'none': (),
    'int32': (('i', ()),),
    'float32': (('f', ()),),
    'float64': (('d', ()),),
    'bytes': (('?', ()),),
    'three bytes': (('b', (3,)),),
    'row': (('f', (12,)),),
    'matrix': (('d', (2, 3)),),
    'halves': (('e', (5,)),),
    'empty rows': (('f', (0,)),),
    'five': (('i', ()), ('f', (2,)), ('d', ()), ('?', (3,)), ('e', ())),
}


def molecule_set(sizes=SIZES, n_relations=1, data='f', atoms='ids', labels='float32', seed=0):
    """Return Molecules of random entries.

    Args:
        sizes (sequence of int): nodes of every molecule; some of them get no entry.
        data (str or None): a dtype's letter.
        atoms (str): 'ids', or the letter of the features' dtype.
        labels (str): one of LABELS.
    """
    rng = numpy.random.RandomState(seed)
    sizes = numpy.array(sizes)
    n_nodes = int(sizes.sum())
    # Molecules of three or four nodes have no entry at all.
    row_nnz = rng.randint(0, 4, n_nodes).astype('i')
    row_nnz[numpy.repeat((sizes == 3) | (sizes == 4), sizes)] = 0
    widths = numpy.repeat(numpy.repeat(sizes * n_relations, sizes), row_nnz)
    columns = (rng.uniform(size=widths.size) * widths).astype('i')
    values = None if data is None else rng.uniform(0.5, 2, columns.size).astype(data)
    nodes = (
        rng.randint(1, 90, n_nodes).astype('i')
        if atoms == 'ids'
        else rng.uniform(size=(n_nodes, 3)).astype(atoms)
    )
    return Molecules(
        nodes,
        sizes,
        sizes + 1,
        row_nnz,
        columns,
        values,
        n_relations,
        [
            (rng.uniform(-99, 99, (sizes.size,) + shape)).astype(dtype)
            for dtype, shape in LABELS[labels]
        ],
    )
