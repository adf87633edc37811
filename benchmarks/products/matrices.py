"""Matrices for benchmarks of products, made on the host; needs no GPU."""

import numpy
import scipy.sparse


def banded(rng, n_rows, half_width):
    """Return (n_rows, n_rows) float64 with every diagonal from -half_width to half_width full."""
    offsets = range(-half_width, half_width + 1)
    return scipy.sparse.diags(
        [rng.uniform(0.5, 1.5, n_rows - abs(offset)) for offset in offsets], offsets, format='csr'
    )


def blocks_of_mesh(rng, side):
    """Return the matrix of a finite element model: 3 unknowns at every node of a cubic mesh.

    An edge of the cube has `side` nodes. Every node has a dense 3 x 3 block for itself and for each
    neighbour in the cube of 27 nodes around it. That makes 81 non-zeros per row inside the mesh,
    and fewer at its faces.
    """
    line = scipy.sparse.diags([1.0, 1.0, 1.0], [-1, 0, 1], shape=(side, side))
    pattern = scipy.sparse.kron(
        scipy.sparse.kron(scipy.sparse.kron(line, line), line), numpy.ones((3, 3)), format='csr'
    )
    pattern.eliminate_zeros()
    pattern.data = rng.uniform(0.5, 1.5, pattern.nnz)
    return pattern


def power_law(rng, n_rows, mean, longest):
    """Return a matrix with row lengths of a power law and random columns.

    Row lengths are ``mean / 2 * u ** (-1 / 2)`` with u uniform on (0, 1], at most `longest`. They
    follow a Pareto law of index 2, in random order. Without the bound their mean would be `mean`.
    Draws of the same place are added up.
    """
    lengths = numpy.minimum(mean / 2 / numpy.sqrt(1 - rng.rand(n_rows)), longest).astype(int)
    indptr = numpy.append(0, numpy.cumsum(lengths))
    matrix = scipy.sparse.csr_matrix(
        (rng.uniform(0.5, 1.5, indptr[-1]), rng.randint(0, n_rows, indptr[-1]), indptr),
        shape=(n_rows, n_rows),
    )
    matrix.sum_duplicates()
    return matrix


def rmat(rng, scale, mean):
    """Return the matrix of an R-MAT graph, whose hubs have thousands of neighbours.

    It has 2^scale rows and `mean` edges per row, before edges at the same place become one. Every
    edge falls into a quadrant of the matrix, then into a quadrant of that, and so on, with the
    probabilities 0.57, 0.19, 0.19 and 0.05 of the Graph500 benchmark (Chakrabarti, Zhan, Faloutsos:
    R-MAT, SDM 2004). Nodes are numbered at random.
    """
    n_rows = 2**scale
    rows, columns = numpy.zeros((2, mean * n_rows), numpy.int64)
    for _ in range(scale):
        is_lower = rng.uniform(size=rows.size) >= 0.57 + 0.19
        is_right = rng.uniform(size=rows.size) >= numpy.where(is_lower, 0.19 / 0.24, 0.57 / 0.76)
        rows, columns = 2 * rows + is_lower, 2 * columns + is_right
    names = rng.permutation(n_rows)
    matrix = scipy.sparse.coo_matrix(
        (rng.uniform(0.5, 1.5, rows.size), (names[rows], names[columns])), (n_rows, n_rows)
    )
    return matrix.tocsr()
