"""Launch policy: which kernel variant and grid to use. Pure functions of a few integers.

Nothing here needs a GPU. The kernels take their tile sizes from what is decided here and nowhere
else, so that grid and tile cannot disagree.
"""
import collections
import functools

# defines: compile-time constants of the kernel; grid, block: in CUDA's order (x, y, z);
# n_vectors: the width of the feature matrix in vectors, an argument of the kernels.
Launch = collections.namedtuple('Launch', 'defines grid block n_vectors')

BLOCK = 128  # threads; large enough for full occupancy, small enough for batches of few rows
WARP = 32
VECTOR_BYTES = 16  # the widest load of one thread
MAX_GRID_Y = 65535


def vector_width(n_channels, itemsize, address_bits):
    """Return how many elements one thread moves at a time.

    The widest of 16, 8, 4, ... bytes that divides a row and that all addresses are aligned to.

    Args:
        n_channels (int): elements a row.
        itemsize (int): bytes an element.
        address_bits (int): the addresses of all arrays involved, or-ed together.
    """
    width = VECTOR_BYTES // itemsize
    while width > 1 and (n_channels % width or address_bits % (width * itemsize)):
        width //= 2
    return width


def bspmm_algorithm(adj):
    """Return the name of the algorithm that ``'auto'`` means for a batch."""
    return 'vector'


@functools.lru_cache(maxsize=4096)
def row_launch(n_rows, n_channels, width):
    """Plan a thread per (row, vector) of a feature matrix: the grid of bspmm and broadcast.

    Args:
        n_rows, n_channels (int): shape of the result, both positive.
        width (int): elements a vector, from :func:`vector_width`.
    """
    n_vectors = n_channels // width
    # As many columns a block as divide the row evenly: 33 vectors are 2 blocks of 17, not 32 + 1.
    tiles = -(-n_vectors // WARP)
    columns = -(-n_vectors // tiles)
    rows = BLOCK // columns
    return Launch((('VECTOR', width),), (-(-n_rows // rows), min(tiles, MAX_GRID_Y), 1),
                  (columns, rows, 1), n_vectors)


@functools.lru_cache(maxsize=4096)
def dot_launch(n_rows, n_channels, width):
    """Plan a sub-warp per row, whose lanes stride over the vectors: the grid of bsddmm.

    Args:
        n_rows, n_channels (int): shape of the left factor, both positive.
        width (int): elements a vector.
    """
    n_vectors = n_channels // width
    lanes = 1
    while lanes < min(n_vectors, WARP):  # a power of two, so that lanes reduce by halving
        lanes *= 2
    rows = BLOCK // lanes
    return Launch((('VECTOR', width), ('LANES', lanes)), (-(-n_rows // rows), 1, 1),
                  (lanes, rows, 1), n_vectors)
