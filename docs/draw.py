"""Draw docs/idea.png: python docs/draw.py"""

import pathlib

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot
from matplotlib.patches import Rectangle

DOCS = pathlib.Path(__file__).parent

# Name, colour, number of heavy atoms, bonds.
MOLECULES = (
    ('methanol', '#0072b2', 2, [(0, 1)]),
    ('acetone', '#d55e00', 4, [(0, 1), (1, 2), (1, 3)]),
    ('benzene', '#009e73', 6, [(i, (i + 1) % 6) for i in range(6)]),
)
N, N_CHANNELS = 6, 3
PHANTOM, EMPTY = '#d9d9d9', 'white'


def cell(axes, x, y, colour):
    axes.add_patch(Rectangle((x, -y - 1), 1, 1, facecolor=colour, edgecolor='#aaaaaa', lw=0.5))


def matrix(axes, x, y, n, bonds, colour, n_padded):
    """Draw an adjacency matrix of n atoms in n_padded rows and columns."""
    entries = {*bonds, *((j, i) for i, j in bonds)}
    for i in range(n_padded):
        for j in range(n_padded):
            inside = i < n and j < n
            filled = colour if (i, j) in entries else EMPTY if inside else PHANTOM
            cell(axes, x + j, y + i, filled)


def features(axes, x, y, n, colour, n_padded):
    for i in range(n_padded):
        for c in range(N_CHANNELS):
            cell(axes, x + c, y + i, colour if i < n else PHANTOM)


def frame(axes, title, width, height):
    axes.set_title(title, fontsize=13, loc='left')
    axes.set_xlim(-0.3, width)
    axes.set_ylim(-height, 1.6)
    axes.set_aspect('equal')
    axes.axis('off')


def draw_idea():
    """Draw the same batch of three molecules padded and dense, folded and sparse."""
    figure, (dense, folded) = pyplot.subplots(1, 2, figsize=(11.5, 5), width_ratios=(1, 1.5))
    height = 3 * N + 2.6
    frame(dense, 'Chainer Chemistry: padded and dense', 15, height)
    for g, (name, colour, n, bonds) in enumerate(MOLECULES):
        y = g * (N + 0.6)
        matrix(dense, 0, y, n, bonds, colour, N)
        dense.text(N + 0.5, -y - N / 2, '×', fontsize=16, va='center', ha='center')
        features(dense, N + 1, y, n, colour, N)
        dense.text(N + 4.4, -y - N / 2, name, fontsize=12, va='center', color=colour)
    dense.text(0, 0.35, 'A (3, 6, 6)', fontsize=11)
    dense.text(N + 1, 0.35, 'X (3, 6, C)', fontsize=11)

    n_rows = sum(n + 1 for _, _, n, _ in MOLECULES)
    frame(folded, 'chainer_bspmm: folded and sparse', n_rows + 9, height)
    folded.add_patch(Rectangle((0, -n_rows), n_rows, n_rows, fill=False, edgecolor='#aaaaaa'))
    start = 0
    for name, colour, n, bonds in MOLECULES:
        matrix(folded, start, start, n, bonds, colour, n + 1)
        features(folded, n_rows + 1, start, n, colour, n + 1)
        x = n_rows + 4.4
        y = -start - n
        folded.text(x, y + n / 2, name, fontsize=12, va='center', color=colour)
        folded.text(x, y - 0.5, f'counts {N - n} times', fontsize=10, va='center', color='#666666')
        start += n + 1
    folded.text(n_rows + 0.5, -n_rows / 2, '×', fontsize=16, va='center', ha='center')
    folded.text(0, 0.35, 'A, block-diagonal', fontsize=11)
    folded.text(n_rows + 1, 0.35, f'X ({n_rows}, C)', fontsize=11)
    write_arrays(folded, -n_rows - 1)
    dense.text(
        0,
        -height + 0.5,
        '108 numbers for 20 entries; white: 0, grey: padding',
        fontsize=11,
        va='center',
    )
    figure.tight_layout()
    figure.savefig(DOCS / 'idea.png', dpi=140, bbox_inches='tight')


def write_arrays(axes, y):
    """Write the arrays of the BatchedCSR of the molecules."""
    offsets = [0]
    weights = []
    indptr = [0]
    indices = []
    for _, _, n, bonds in MOLECULES:
        for i in range(n + 1):  # the last row stands for the phantom atoms
            neighbours = sorted(sum(bond) - i for bond in bonds if i in bond)
            indices += [offsets[-1] + j for j in neighbours]
            indptr.append(len(indices))
        offsets.append(offsets[-1] + n + 1)
        weights += [1] * n + [N - n]
    for k, (name, values) in enumerate(
        (
            ('row_offsets', offsets),
            ('row_weights', weights),
            ('indptr', indptr),
            ('indices', indices),
        )
    ):
        text = f'{name:<12}' + ' '.join(map(str, values))
        axes.text(0, y - 1.1 * k, text, fontsize=10, family='monospace', va='center')


if __name__ == '__main__':
    draw_idea()
