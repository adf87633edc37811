"""Graph convolutions of Chainer Chemistry that no sparse product can replace, and why."""

from chainer_chemistry.links.update.cgcnn_update import CGCNNUpdate
from chainer_chemistry.links.update.megnet_update import MEGNetUpdate
from chainer_chemistry.links.update.mpnn_update import EdgeNet, MPNNUpdate
from chainer_chemistry.links.update.schnet_update import CFConv, SchNetUpdate
from chainer_chemistry.models.cgcnn import CGCNN
from chainer_chemistry.models.ggnn import SparseGGNN
from chainer_chemistry.models.megnet import MEGNet
from chainer_chemistry.models.schnet import SchNet
from chainer_chemistry.models.weavenet import WeaveModule, WeaveNet

SCHNET = (
    'has no adjacency matrix: its filters are functions of the distances between atoms, and '
    'every pair of atoms has one'
)
WEAVENET = (
    'has no adjacency matrix: it keeps features for every pair of atoms, bonded or not, '
    'and updates them all'
)
INDEXED = (
    'has no adjacency matrix: it gathers and adds features by index, along a list of %s, '
    'and needs the batches of its own converter'
)

EDGENET = (
    'gives every pair of atoms, bonded or not, a separate matrix, made by a network with '
    'biases: its messages come from all atoms, and no entry is zero'
)

# Advice for a model that is refused, and the page that lists the methods.
UNSWAPPED = "It runs unswapped, with upstream's converter: python -m chainer_bspmm run SCRIPT.py"
LISTED = 'docs/methods.md lists what can be swapped'

# Class of Chainer Chemistry -> the rest of the sentence that begins with its name.
REFUSALS = {
    SchNet: SCHNET,
    SchNetUpdate: SCHNET,
    CFConv: SCHNET,
    WeaveNet: WEAVENET,
    WeaveModule: WEAVENET,
    MPNNUpdate: EDGENET,
    EdgeNet: EDGENET,
    MEGNet: INDEXED % 'pairs',
    MEGNetUpdate: INDEXED % 'pairs',
    CGCNN: INDEXED % 'neighbours',
    CGCNNUpdate: INDEXED % 'neighbours',
    SparseGGNN: 'multiplies by a chainer.utils.CooMatrix already; GGNN, which has the same '
    'parameters, can be swapped',
}
