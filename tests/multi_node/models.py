"""Models, batches and optimizers for several ranks, and training of every model."""

from chainer_bspmm import CSRConverter  # repairs Chainer before anything imports it
import chainer
import numpy
from chainer import functions
from chainer.training import extension, StandardUpdater

from chainer_bspmm.dataset import to_sparse
from chainer_bspmm.training import GraphUpdater
from tests.support.training import MODELS, molecules, RELATIONS

N_STEPS = 6  # eager steps: each of four batches at least once
N_STEPS_ON_GPUS = 20
N_ALL = 12  # molecules of a step, of all ranks together
CONVERTERS = {
    'packed': CSRConverter('packed'),
    # If batches were padded to their largest molecule, results would depend on the ranks.
    'folded': CSRConverter('folded', padded_to=12),
}
CASES = [(name, 'packed') for name in MODELS]
CASES += [(name, 'folded') for name in ('RSGCN, batch norm', 'RelGCN')]


class NormOfHead(chainer.Chain):
    """Predictor that normalises features of molecules instead of atoms over the batch."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.predictor = MODELS['RSGCN']()
            self.norm = chainer.links.BatchNormalization(5)

    def forward(self, atoms, adj):
        return self.norm(self.predictor(atoms, adj))


def regressor(name, seed=0, batch_norm_over=None):
    from chainer_chemistry.models.prediction import Regressor

    numpy.random.seed(seed)
    model = NormOfHead() if name == 'norm of head' else MODELS[name]()
    for link in model.links():
        if hasattr(link, 'dropout_ratio'):
            link.dropout_ratio = 0.0  # ranks would draw different numbers
    if batch_norm_over:
        from chainermn.links import create_mnbn_model

        model = create_mnbn_model(model, batch_norm_over)
    return Regressor(model, lossfun=squared_error)


def squared_error(y, t):
    return functions.mean_squared_error(y[:, :3], t)


def communicator(name='naive'):
    import chainermn

    return chainermn.create_communicator(name)


def optimizer_of(model, comm, actual=None):
    """Return an optimizer of all ranks, or Chainer's own if there is no communicator."""
    # With the default eps, Adam would make a full step of a gradient that is only rounding.
    optimizer = actual or chainer.optimizers.Adam(eps=1e-3)
    if comm:
        import chainermn

        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1))  # clips the mean of all ranks
    return optimizer


def arrays_of(model):
    """Return parameters and persistent values as a dict."""
    serializer = chainer.serializers.DictionarySerializer()
    model.serialize(serializer)
    return dict(serializer.target)


def my_share(examples, comm, sizes=None):
    """Return this rank's share of the examples of each step, in the order of steps."""
    if comm is None:
        return examples
    sizes = sizes or [N_ALL // comm.size] * comm.size
    first = sum(sizes[: comm.rank])
    share = []
    for start in range(first, len(examples), N_ALL):
        share += examples[start : start + sizes[comm.rank]]
    return share


def parameters_of_every_model(comm, device='@numpy', check=lambda updater: None):
    """Train every model; return the parameters after the first step and after the last."""
    arrays = {}
    chainer.get_device(device).use()
    for name, layout in CASES:
        examples = molecules(4 * N_ALL, RELATIONS.get(name, 1))
        model = regressor(name, 0, comm if 'norm' in name else None)
        if device != '@numpy':  # CuPy's seed differs between processes
            with chainer.using_config('train', False), chainer.using_device('@numpy'):
                model(*CONVERTERS[layout](examples[:2]))
        model.to_device(device)
        part = to_sparse(my_share(examples, comm))
        kind = StandardUpdater if layout == 'packed' and device == '@numpy' else GraphUpdater
        iterator = chainer.iterators.SerialIterator(part, len(part) // 4, shuffle=False)
        updater = kind(
            iterator, optimizer_of(model, comm), converter=CONVERTERS[layout], device=device
        )
        n_steps = N_STEPS if device == '@numpy' else N_STEPS_ON_GPUS
        for step in range(n_steps):
            updater.update()
            if step in (0, n_steps - 1):
                check(updater)
                for key, value in arrays_of(model).items():
                    arrays['%s, %s, %d %s' % (name, layout, step, key)] = value
    return arrays


class Disagreement(Exception):
    """Rank and message with which `faults.raise_on` would end all ranks."""


def raise_now(comm, rank, error):
    raise Disagreement(rank, str(error))


class At(extension.Extension):
    """Extension that calls a function after one step."""

    trigger = (1, 'iteration')

    def __init__(self, step, function):
        self.step = step
        self.function = function

    def __call__(self, trainer):
        if trainer.updater.iteration == self.step:
            self.function()
