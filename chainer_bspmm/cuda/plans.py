"""Launch plans: the parts that all operations share. Pure functions of a few integers."""
# Kernels take their tile sizes from constants of the plan, so grid and tile cannot disagree.

import collections
from collections.abc import Callable
import functools
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import numpy

Parameters = ParamSpec('Parameters')
Plan = TypeVar('Plan', covariant=True)


class Launch(NamedTuple):
    """Plan of a launch: how a kernel is compiled and launched."""

    defines: tuple  # compile-time constants, pairs of name and value
    grid: tuple[int, int, int]  # in CUDA's order (x, y, z), like `block`
    block: tuple[int, int, int]
    shared_bytes: int = 0  # dynamic shared memory of a block
    arguments: tuple = ()  # the sizes among the kernel's arguments, which follow its arrays


class Kept(Protocol[Parameters, Plan]):
    """Type of a cached function, with its parameters, which the type of `lru_cache` forgets."""

    __wrapped__: Callable[Parameters, Plan]

    def cache_clear(self) -> None: ...

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Plan: ...


def kept(function: Callable[Parameters, Plan]) -> Kept[Parameters, Plan]:
    """Cache up to 4,096 plans of a function."""
    return functools.lru_cache(maxsize=4096)(function)


BLOCK = 128  # threads: enough for full occupancy, but not too many for batches of few rows
WARP = 32
VECTOR_BYTES = 16  # the widest load of one thread
MAX_GRID_Y = 65535
MAX_BLOCK = 1024
QUAD = 4  # elements that a kernel loads from shared memory at once; rows are padded to multiples
LONG_ROW = 128  # entries; no molecule has longer rows, and a matrix that has some gets other plans


def widest_vector(n_channels, itemsize, address_bits) -> int:
    """Return the number of elements that a thread moves at a time, for or-ed addresses."""
    # It is the widest of 16, 8, 4, ... bytes that divides a row and to which all addresses are
    # aligned.
    width = VECTOR_BYTES // itemsize
    while width > 1 and (n_channels % width or address_bits % (width * itemsize)):
        width //= 2
    return width


# A GPU: the number of its multiprocessors, the bytes of its L2 cache, and the bytes of shared
# memory that a block may have.
Device = collections.namedtuple('Device', 'n_sms l2_bytes shared_bytes', defaults=(227 << 10,))

# Vectors of a row that a lane of bsddmm_csr loads at once for each entry (TILE in the kernel).
ROW_TILE = 2


@kept
def dot_launch(n_rows, n_channels, width, tile=ROW_TILE) -> Launch:
    """Plan bsddmm_csr: a sub-warp per row, with at most `tile` vectors per lane at once."""
    n_vectors = n_channels // width
    tile = min(n_vectors, tile)
    lanes = 1
    while lanes * tile < n_vectors and lanes < WARP:  # a power of two: lanes add up pair by pair
        lanes *= 2
    rows = BLOCK // lanes
    return Launch(
        (('VECTOR', width), ('LANES', lanes), ('TILE', tile)),
        (-(-n_rows // rows), 1, 1),
        (lanes, rows, 1),
        arguments=(numpy.int32(n_rows), numpy.int32(n_vectors)),
    )


def one_block(n) -> Launch:
    """Plan one block, with a thread for each of n elements if there are at most 1,024."""
    n_threads = min(-(-n // WARP) * WARP, 1024)
    return Launch((('VECTOR', 1),), (1, 1, 1), (n_threads, 1, 1))


def row_threads(n_rows) -> Launch:
    """Plan a thread for each row."""
    return Launch((('VECTOR', 1),), (-(-n_rows // BLOCK), 1, 1), (BLOCK, 1, 1))


def vector_threads(n_units, n_vectors, width, arguments) -> Launch:
    """Plan a thread per (unit, vector), in blocks whose width leaves few threads idle."""
    tiles = -(-n_vectors // WARP)
    columns = -(-n_vectors // tiles)
    units = BLOCK // columns
    return Launch(
        (('VECTOR', width),),
        (-(-n_units // units), min(tiles, MAX_GRID_Y), 1),
        (columns, units, 1),
        arguments=tuple(map(numpy.int32, arguments)),
    )
