"""How fast is a step of node classification on one large graph?

It compares upstream's GINSparse, which takes a list of edges, upstream's GIN with a CooMatrix,
ours, and PyTorch Geometric, on generated graphs of the sizes of Cora and Reddit. ``python -m
benchmarks.training.bench_network --device 0`` writes ``benchmarks/results/<gpu>/network.json``.
"""

import collections
import gc
import tempfile
import time

import chainer_bspmm
import chainer
from chainer.backends import cuda
from chainer.utils import CooMatrix
from chainer_chemistry.dataset.graph_dataset.base_graph_data import PaddingGraphData
from chainer_chemistry.dataset.graph_dataset.base_graph_data import SparseGraphData
from chainer_chemistry.models.gin import GIN, GINSparse
from chainer_chemistry.models.prediction.node_classifier import NodeClassifier
from chainer_chemistry.utils.train_utils import run_node_classification_train as upstreams
import numpy

from benchmarks import harness
from chainer_bspmm.training import run_node_classification_train as ours
from tests.support.graph_data import OfPaddingData

try:
    from benchmarks.peers import geometric_nodes
except ImportError as error:
    geometric_nodes = None
    no_torch = str(error)

# nodes, citations: numbers of nodes, and of edges in one direction. words, classes: widths.
# warm, steps: in a round, our steps before the timed ones, and the timed steps. No timed step is
# checked: checks are at replays 1, 2, 4, 8, ..., and take longer than a step.
Size = collections.namedtuple('Size', 'nodes citations words classes warm steps rounds')
SIZES = {
    'Cora': Size(2_708, 5_278, 1_433, 7, 140, 100, 5),
    'Reddit': Size(232_965, 57_307_946, 602, 41, 20, 5, 1),
}
WARM = 5  # untimed steps of the other contenders, which have no checks
N_UNIT, N_LAYERS, DROPOUT = 32, 2, 0.5
LOSS_ERROR = 1e-4

SCATTER, COO, OURS = 'upstream, scatter_add', 'upstream, CooMatrix', 'ours'
GEOMETRIC, GEOMETRIC_CAPTURED = 'PyTorch Geometric', 'PyTorch Geometric, captured'

Network = collections.namedtuple('Network', 'x edges y train valid')


def generate(size, seed=0):
    """Return a random `Network`, in which some nodes are cited far more often than others.

    Before nodes are shuffled, node i takes part in a citation with a probability proportional to
    (i + 10)^-1/2; both ends are drawn in this way. Repeated citations count twice.
    """
    rng = numpy.random.RandomState(seed)
    until = numpy.cumsum((numpy.arange(size.nodes) + 10) ** -0.5)
    names = rng.permutation(size.nodes).astype(numpy.int32)
    ends = [
        names[numpy.searchsorted(until, rng.uniform(0, until[-1], size.citations))]
        for _ in range(2)
    ]
    edges = numpy.stack([numpy.append(*ends), numpy.append(*ends[::-1])])
    x = (rng.uniform(size=(size.nodes, size.words)) < 0.02).astype(numpy.float32)
    y = rng.randint(0, size.classes, size.nodes).astype(numpy.int32)
    order = rng.permutation(size.nodes)
    return Network(x, edges, y, order < size.nodes // 5, order >= size.nodes * 4 // 5)


def edge_list(network):
    return SparseGraphData(x=network.x, edge_index=network.edges, y=network.y)


def coo_matrix(network):
    col, row = network.edges
    adj = CooMatrix(numpy.ones(row.size, 'f'), row, col, (len(network.y),) * 2)
    return PaddingGraphData(x=network.x[None], adj=adj, y=network.y)


def classifier(kind, network, dropout=DROPOUT):
    # Both generators are seeded, because lazy layers draw their weights on the input's device.
    for xp in (numpy, cuda.cupy) if cuda.available else (numpy,):
        xp.random.seed(0)
    model = kind(
        out_dim=None,
        node_embedding=True,
        hidden_channels=N_UNIT,
        out_channels=int(network.y.max()) + 1,
        n_update_layers=N_LAYERS,
        dropout_ratio=dropout,
    )
    return NodeClassifier(OfPaddingData(model) if kind is GIN else model)


def wait(device):
    if device.xp is not numpy:
        device.device.synchronize()


class Timer(chainer.training.Extension):
    """Extension that records the time after some steps, and the loss of the first step."""

    trigger = 1, 'iteration'

    def __init__(self, device, at):
        self._device, self._at = device, at
        self.times = []
        self.loss = None

    def __call__(self, trainer):
        if trainer.updater.iteration == 1:
            self.loss = float(trainer.observation['main/loss(train)'])
        if trainer.updater.iteration in self._at:
            wait(self._device)
            self.times.append(time.perf_counter())


def train(run, model, data, network, device, *at):
    """Train by a public function until the last step of `at`; return the `Timer` of these steps."""
    timer = Timer(device, at)
    with tempfile.TemporaryDirectory() as out:
        run(
            model,
            data,
            network.train,
            network.valid,
            epoch=at[-1],
            out=out,
            device=device,
            use_default_extensions=False,
            extensions_list=[timer],
        )
    return timer


def contenders(network, size, device):
    """Return name -> function that returns the milliseconds of a step."""

    def chainers(run, kind, data, prepare=lambda model: model):
        def call():
            model = prepare(classifier(kind, network))
            warm = size.warm if run is ours else WARM
            found = train(run, model, data(network), network, device, warm, warm + size.steps)
            return numpy.diff(found.times)[0] * 1e3 / size.steps

        return call

    def geometric(is_captured):
        def call():
            trainer = geometric_nodes.Trainer(
                network.x,
                network.edges,
                network.y,
                numpy.flatnonzero(network.train),
                numpy.flatnonzero(network.valid),
                N_UNIT,
                N_LAYERS,
                DROPOUT,
                'cpu' if device.xp is numpy else 'cuda',
                is_captured,
            )
            trainer.run(WARM)
            trainer.wait()
            start = time.perf_counter()
            trainer.run(size.steps)
            trainer.wait()
            return (time.perf_counter() - start) * 1e3 / size.steps

        return call

    found = {
        OURS: chainers(ours, GINSparse, edge_list, chainer_bspmm.sparsify),
        SCATTER: chainers(upstreams, GINSparse, edge_list),
        COO: chainers(upstreams, GIN, coo_matrix),
    }
    if geometric_nodes:
        found[GEOMETRIC] = geometric(False)
        if device.xp is not numpy:
            found[GEOMETRIC_CAPTURED] = geometric(True)
    return found


def check(network, device):
    """Raise AssertionError unless our first loss equals upstream's, without dropout."""
    losses = []
    for run, prepare in ((ours, chainer_bspmm.sparsify), (upstreams, lambda model: model)):
        model = prepare(classifier(GINSparse, network, 0.0))
        losses.append(train(run, model, edge_list(network), network, device, 1).loss)
    errors = {'loss': abs(losses[0] - losses[1]) / abs(losses[1])}
    harness.gate(errors, LOSS_ERROR)
    return errors


def run_size(name, size, device):
    start = time.perf_counter()
    network = generate(size)
    print('%s: generated in %.0f s' % (name, time.perf_counter() - start), flush=True)
    start = time.perf_counter()
    adj = chainer_bspmm.dataset.to_sparse([edge_list(network)]).molecules
    seconds = time.perf_counter() - start
    longest = int(adj.longest[0])
    del adj
    times = collections.defaultdict(list)
    not_run = {}
    try:
        errors = check(network, device)
    except MemoryError as error:  # upstream's dense arrays may be too large
        errors = {}
        not_run['check'] = str(error)
    for _ in range(size.rounds):
        for contender, call in contenders(network, size, device).items():
            if contender in not_run:
                continue
            try:
                times[contender].append(call())
            except Exception as error:  # a peer may lack the memory or a function
                if contender == OURS:
                    raise
                not_run[contender] = '%s: %s' % (type(error).__name__, str(error)[:200])
            gc.collect()
            if device.xp is not numpy:
                cuda.cupy.get_default_memory_pool().free_all_blocks()
                if geometric_nodes:
                    geometric_nodes.torch.cuda.empty_cache()
    medians = {name: harness.summary(values) for name, values in times.items()}
    print(name, {key: value['median'] for key, value in medians.items()}, not_run, flush=True)
    return {
        'size': size._asdict(),
        'longest_row': longest,
        'seconds_to_build': round(seconds, 2),
        'errors': errors,
        'milliseconds': medians,
        'times_faster': {
            key: round(value['median'] / medians[OURS]['median'], 2)
            for key, value in medians.items()
            if key != OURS
        },
        'not_run': not_run,
    }


def main(argv=None):
    parser = harness.argument_parser(__doc__)
    parser.add_argument('--device', default='-1', help='number of a GPU; -1: the CPU')
    parser.add_argument('--networks', nargs='+', choices=SIZES, default=list(SIZES))
    args = parser.parse_args(argv)
    device = harness.device_of(args.device)
    head = {
        'question': 'a step of node classification: %d layers of %d units, Adam, dropout, losses '
        'and accuracies of training and validation nodes' % (N_LAYERS, N_UNIT),
        'method': 'wall time of steps behind others, none of them one in which captured steps are '
        'checked, by the functions that users call; medians of as many interleaved rounds as size '
        'says; graphs are generated, of the size of the networks that name them',
        'conditions': harness.step_conditions(args.commit, device),
        'not_run': {} if geometric_nodes else {GEOMETRIC: no_torch},
    }
    result = harness.resumed('network', head, args.out)
    networks = result.setdefault('networks', {})
    for name in args.networks:
        if name not in networks:
            networks[name] = run_size(name, SIZES[name], device)
            print('wrote', harness.save('network', result, args.out))


if __name__ == '__main__':
    main()
