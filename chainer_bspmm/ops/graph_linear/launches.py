"""A layer as one launch of a GPU, kernels/graph_linear.cu, and its gradient as another."""

import math
from typing import NamedTuple

import numpy

from chainer.backends import cuda

from chainer_bspmm.cuda import gemm, kernels, launch
from chainer_bspmm.cuda.partial_sums import sum_partials
from chainer_bspmm.cuda import plans
from chainer_bspmm.ops.dropout import draw_arguments
from chainer_bspmm.sparse.build import values_of


class Layer(NamedTuple):
    """A layer as kernels/graph_linear.cu computes it."""

    width_in: int
    width_out: int
    n_relations: int  # 0: it has no W
    has_self: bool  # whether it has W_self
    loop: bool  # each row is one more neighbour of itself
    has_relation_bias: bool  # whether it has b
    n_biases: int  # number of rows of b_self
    by_relation: bool  # W is one matrix after the other; else the relation is its minor index
    activation: str


LAYER_THREADS = 256
LAYER_ROWS = 16, 20, 24, 32  # of a tile: the fewest that give no multiprocessor two tiles
LAYER_SLICES = 1, 2, 4  # slices of a result's columns: several if it is too wide for one block
# Size of an element in bytes -> 4 x 4 blocks of the weights' gradients that a thread holds in
# registers; half as many if there are twice the threads.
LAYER_BLOCKS = {4: 6, 8: 2}

LAYER_RESIDENT = 2  # most blocks of threads on a multiprocessor
SM_SHARED_BYTES = 228 << 10  # of a multiprocessor; every block takes 1 KB for the system


@plans.kept
def layer_launch(layer, n_rows, itemsize, quads, device, is_backward) -> plans.Launch | None:
    """Plan a layer, or its gradient, as one launch; return None if it does not fit.

    `quads`: whether rows of all arrays are aligned to four elements.
    """
    produced = layer.width_in if is_backward else layer.width_out
    for slices in LAYER_SLICES:
        if slices == 1 or produced % (4 * slices) == 0:
            plan = _layer_launch(layer, n_rows, itemsize, quads, device, is_backward, slices)
            if plan is not None:
                return plan
    return None


def _layer_launch(
    layer, n_rows, itemsize, quads, device, is_backward, slices
) -> plans.Launch | None:
    real = max(itemsize, 4)
    n_in, n_out = -(-layer.width_in // 4), -(-layer.width_out // 4)  # in quads
    if is_backward:
        n_in = -(-n_in // slices)
    else:
        n_out = -(-n_out // slices)
    gathered, produced = (n_out, n_in) if is_backward else (n_in, n_out)
    mapped = layer.n_relations + layer.has_self
    terms = mapped + (is_backward and layer.n_biases > 0 and not layer.has_self)
    if is_backward and mapped * n_in * n_out > LAYER_THREADS * LAYER_BLOCKS[real]:
        return None
    # Twice the threads hide more latency in two cases. One is several matrices, though not of
    # float64, which would need too many registers. The other is a multiprocessor with a single
    # tile. There the gradient gains nothing, because a thread would hold fewer weights, and so use
    # each row that it loads for fewer of them.
    has_one_tile = n_rows <= max(LAYER_ROWS) * device.n_sms
    has_several_matrices = mapped > 2 and real == 4
    if is_backward:
        is_double = has_several_matrices and not has_one_tile
    else:
        is_double = has_several_matrices or has_one_tile
    threads = LAYER_THREADS << is_double

    def shared_bytes(rows, splits):
        of_row = splits * produced * 4 + terms * gathered * 4 + 4
        if is_backward:
            of_row += produced * 4 + 4
        elif layer.has_relation_bias:
            of_row += layer.n_relations
        return real * (mapped * n_out * 4 * (n_in * 4 + 4) + rows * of_row)

    fitting = {}  # rows -> splits
    for rows in LAYER_ROWS:
        # Static shared memory holds, for every row, its pattern of relations, and for every warp
        # (as many as there can be) an order of the rows.
        limit = device.shared_bytes - rows * (4 + 2 * LAYER_THREADS // plans.WARP)
        splits = max(1, min(threads // (produced * rows // 4), gathered))
        while splits > 1 and shared_bytes(rows, splits) > limit:
            splits //= 2
        if shared_bytes(rows, splits) <= limit:
            fitting[rows] = splits
    if not fitting:
        return None
    # With many tiles, the gradients of one matrix use small ones: two blocks then fit.
    most = min(fitting) if is_backward and mapped == 1 else max(fitting)
    rows = next((rows for rows in fitting if n_rows * slices <= rows * device.n_sms), most)
    n_bytes = shared_bytes(rows, fitting[rows])
    resident = max(1, min(LAYER_RESIDENT, SM_SHARED_BYTES // (n_bytes + 2048)))
    return plans.Launch(
        (
            ('VECTOR', 1),
            ('QUADS', int(quads)),
            ('ROWS', rows),
            ('THREADS', threads),
            ('SPLITS', fitting[rows]),
            ('SLICES', slices),
            ('WIDTH_IN', layer.width_in),
            ('WIDTH_OUT', layer.width_out),
            ('RELATIONS', layer.n_relations),
            ('SELF', int(layer.has_self)),
            ('LOOP', int(layer.loop)),
            ('RELATION_BIAS', int(layer.has_relation_bias)),
            ('BIASES', layer.n_biases),
            ('BY_RELATION', int(layer.by_relation)),
            ('ACTIVATION', layer.activation.upper()),
            ('BACKWARD', int(is_backward)),
        ),
        (min(-(-n_rows // rows), max(1, resident * device.n_sms // slices)), slices, 1),
        (threads, 1, 1),
        n_bytes,
        (numpy.int32(n_rows),),
    )


def layer_of(
    x, parameters, n_relations, loop, activation, by_relation=False, longest=0
) -> Layer | None:
    """Return a layer of a graph convolution as a `Layer`, or None if it cannot be one launch.

    One launch needs a GPU, matrices that have elements, fit into shared memory and are not faster
    as products by cuBLAS, and no long row, because all rows of a tile wait for the longest one.
    `parameters` (W, b, W_self, b_self) and `loop` are as in
    :func:`~chainer_bspmm.ops.graph_linear.node.graph_linear`, but b_self may be several biases, one
    after the other, which are all added. `by_relation`: W is one matrix after the other. `longest`:
    upper bound of the number of entries in a row.
    """
    if longest > plans.LONG_ROW or not launch.on_gpu(x):
        return None
    n_all, width_in = parameters['W' if n_relations else 'W_self'].shape
    if not n_all or not width_in:
        return None
    width_out = n_all // max(n_relations, 1)
    layer = Layer(
        width_in=width_in,
        width_out=width_out,
        n_relations=n_relations,
        has_self='W_self' in parameters,
        loop=loop,
        has_relation_bias='b' in parameters,
        n_biases=parameters['b_self'].size // width_out if 'b_self' in parameters else 0,
        by_relation=by_relation,
        activation=activation,
    )
    if not by_relation and gemm.products_are_faster(
        x.dtype,
        n_rows=len(x),
        n_in=width_in,
        n_out=width_out,
        n_matrices=layer.n_relations + layer.has_self,
    ):
        return None
    device = kernels.device(x.data.device_id)
    for is_backward in (False, True):
        plan = layer_launch(
            layer,
            n_rows=1,
            itemsize=x.itemsize,
            quads=False,
            device=device,
            is_backward=is_backward,
        )
        if plan is None:
            return None
    return layer


def layer_forward(layer, rows, x, parameters, dropout_ratio=0.0, draw=None, out=None):
    """Compute a layer that :func:`layer_of` returned, in `out` if that is given.

    `rows` is the result of `sparse.relations.relation_rows`, `draw` of `ops.dropout.step_draw`.
    """
    with launch.device_of(x):
        x = launch.contiguous(x)
        y = cuda.cupy.empty((len(x), layer.width_out), x.dtype) if out is None else out
        _layer(layer, rows, x, parameters, y, dropout_ratio=dropout_ratio, draw=draw)
    return y


def layer_backward(
    layer, rows, x, y, gy, parameters, dropout_ratio=0.0, has_features=True, more=None
):
    """Return {name: gradient} for x and all parameters, given the layer's result y and gy.

    `rows` is the result of `sparse.relations.transposed_rows`. The gradient with respect to x is
    computed if `has_features`, and added to `more`. The gradients of parameters come from
    `sum_partials`, so they may be deferred. If the layer is ``by_relation``, W and b_self are
    lists, with an array for each relation and each bias.
    """
    n_out = layer.width_out
    n_all = layer.n_relations * layer.width_out
    shapes = {}
    if layer.n_relations:
        shapes['W'] = n_all, layer.width_in
    if layer.has_self:
        shapes['W_self'] = n_out, layer.width_in
    if layer.has_relation_bias:
        shapes['b'] = (n_all,)
    if layer.n_biases:
        shapes['b_self'] = (n_out,)
    with launch.device_of(x):
        x, gy, more = (launch.contiguous(array) for array in (x, gy, more))
        gx = cuda.cupy.empty(x.shape, x.dtype) if has_features else None
        partials = _layer(
            layer,
            rows,
            gy,
            parameters,
            gx,
            dropout_ratio=dropout_ratio,
            y=y,
            x=x,
            shapes=shapes,
            more=more,
        )
        parts = []
        first = 0
        for name, shape in shapes.items():
            if not layer.by_relation:
                parts.append((first, shape, x.dtype))
            elif name == 'b_self':  # biases have the same gradient, but separate arrays
                parts += [(first, shape, x.dtype)] * layer.n_biases
            else:
                matrix = (n_out, layer.width_in)
                size = n_out * layer.width_in
                parts += [(first + r * size, matrix, x.dtype) for r in range(layer.n_relations)]
            first += math.prod(shape)
        if partials is None:
            sums = [cuda.cupy.zeros(*part[1:]) for part in parts]
        else:
            sums = sum_partials(partials, parts)
    if layer.by_relation:
        n = layer.n_relations
        return {'W': sums[:n], 'b_self': sums[n:], 'x': gx}
    return dict(zip(shapes, sums), x=gx)


def _layer(
    layer,
    matrix,
    rows,
    parameters,
    result,
    *,
    dropout_ratio,
    draw=None,
    y=None,
    x=None,
    shapes=None,
    more=None,
):
    """Launch kernels/graph_linear.cu; for a gradient return the partial sums of `shapes`.

    Forward, it reads `rows`, which is x, and writes y to `result`. Backward, `rows` is gy, `result`
    is gx, and `y` and `x` are the layer's.
    """
    if not len(rows):
        return None
    is_backward = x is not None
    W, W_self = (launch.contiguous(parameters.get(name)) for name in ('W', 'W_self'))
    b = b_self = None
    if not is_backward:
        b, b_self = (launch.contiguous(parameters.get(name)) for name in ('b', 'b_self'))
    weights = 0
    data = indptr = indices = None
    if layer.n_relations:
        weights, data, _ = values_of(matrix)
        indptr, indices = matrix.indptr, matrix.indices
    bits = launch.address_bits(rows, y, x, W, W_self, more, result)
    quads = not (layer.width_in % 4 or layer.width_out % 4 or bits % (4 * rows.itemsize))
    device = kernels.device(rows.data.device_id)
    plan = layer_launch(
        layer,
        len(rows),
        itemsize=rows.itemsize,
        quads=quads,
        device=device,
        is_backward=is_backward,
    )
    partials = None
    if is_backward:
        n_columns = -(-sum(map(math.prod, shapes.values())) // 4) * 4
        partials = cuda.cupy.empty((plan.grid[0], n_columns), launch.arithmetic(rows.dtype))
    seed, stream, counter = draw or (0, 0, None)
    graph = indptr, indices, data
    layers = W, W_self, b, b_self
    launch.run(
        'graph_linear',
        rows,
        plan,
        *graph,
        rows,
        y,
        x,
        *layers,
        more,
        result,
        partials,
        counter,
        numbers=draw_arguments(seed, stream, dropout_ratio, rows.dtype),
        WEIGHTED=weights,
        DROPOUT=dropout_ratio > 0,
        FEATURES=result is not None,
    )
    return partials
