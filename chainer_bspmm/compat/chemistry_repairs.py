"""Repairs of Chainer Chemistry 0.7.1."""

import functools
import inspect
import types

import numpy

from chainer_bspmm.compat.import_hooks import explain_absence, repairs
from chainer_bspmm.compat.module_view import ModuleView, give_back_numpy_names

# --- names that NumPy or Python lost ---

# Module -> the name that it reads from NumPy. int, float and bool are gone in NumPy 1.24 (bool is
# back in NumPy 2), in1d is gone in NumPy 2.4.
LOST_NAMES = {
    'dataset.networkx_preprocessors.base_networkx': 'int',  # not in the wheel
    'dataset.graph_dataset.base_graph_dataset': 'int',
    'dataset.splitters.stratified_splitter': 'int',
    'dataset.preprocessors.gin_preprocessor': 'int',
    'dataset.preprocessors.ggnn_preprocessor': 'int',
    # Upstream catches the error, so that the *_gwm methods drop every molecule.
    'dataset.preprocessors.common': 'float',
    'dataset.indexer': 'bool',
    'training.extensions.roc_auc_evaluator': 'in1d',
    'training.extensions.prc_auc_evaluator': 'in1d',
}
for _module, _name in LOST_NAMES.items():
    repairs('chainer_chemistry.' + _module)(
        lambda module, name=_name: give_back_numpy_names(module, 'numpy', name)
    )


@repairs('chainer_chemistry.datasets.reddit.reddit')  # not in the wheel
def reddit_reads_from_scipy_sparse_matrix(module):
    """datasets/reddit/reddit.py: networkx.from_scipy_sparse_matrix (gone in networkx 3)."""
    if not hasattr(module.nx, 'from_scipy_sparse_matrix'):
        read = module.nx.from_scipy_sparse_array
        module.nx = ModuleView(module.nx, from_scipy_sparse_matrix=read)


@repairs('chainer_chemistry.links.update.relgat_update')
def relgat_reads_bool(module):
    """links/update/relgat_update.py: xp.bool (gone in NumPy 1.24, back with NumPy 2)."""
    # It reads the link's array module, which may be CuPy; so the link returns a view.

    def xp(self):
        own = super(module.RelGATUpdate, self).xp
        return own if 'bool' in vars(own) else ModuleView(own, bool=numpy.bool_)

    module.RelGATUpdate.xp = property(xp)


@repairs('chainer_chemistry.utils.sparse_utils')
def sparse_utils_need_no_distutils(module):
    """utils/sparse_utils.py: distutils.version (gone in Python 3.12) to ask for NumPy 1.16."""
    module.sparse_utils_available = lambda: module._coomatrix_imported


@repairs('chainer_chemistry.saliency.visualizer.mol_visualizer')
def colours_are_floats(module):
    """saliency/visualizer/mol_visualizer.py: colours are NumPy's float32, which RDKit refuses."""
    visualize = module.MolVisualizer.visualize

    @functools.wraps(visualize)
    def visualize_in_double(self, saliency, *args, **kwargs):
        return visualize(self, numpy.asarray(saliency, float), *args, **kwargs)

    module.MolVisualizer.visualize = visualize_in_double


@repairs('chainer_chemistry.saliency.calculator.occlusion_calculator')
def windows_have_several_elements(module):
    """saliency/calculator/occlusion_calculator.py: it reshapes one score to the whole window."""
    # That fails unless a window has one element along each axis on which it slides. Here the score
    # of each molecule is broadcast instead.
    get_array_module = module.cuda.get_array_module

    def reshape(scores, shape):
        return scores.reshape([len(scores)] + [1] * (len(shape) - 1))

    module.cuda = ModuleView(
        module.cuda,
        get_array_module=lambda *args: ModuleView(get_array_module(*args), reshape=reshape),
    )


# --- lists of arrays of different shapes, which NumPy 1.24 no longer turns into arrays ---


def _ragged_array(items, *args, **kwargs):
    """Act as numpy.array, but turn arrays of different shapes into an array of objects."""
    if args or kwargs or len({numpy.shape(item) for item in items}) < 2:
        return numpy.array(items, *args, **kwargs)
    objects = numpy.empty(len(items), dtype=object)
    objects[:] = items
    return objects


class _RaggedRandomState(numpy.random.RandomState):
    """A RandomState that permutes lists of different lengths, as NumPy < 1.24 did."""

    def permutation(self, x):
        if not isinstance(x, list):
            return super().permutation(x)
        objects = numpy.empty(len(x), dtype=object)
        objects[:] = x
        return super().permutation(objects)


@repairs('chainer_chemistry.dataset.splitters.scaffold_splitter')
def scaffold_splitter_permutes_lists(module):
    """dataset/splitters/scaffold_splitter.py: permutes a list of lists of different lengths."""
    # The permutation of an object array draws the same numbers, so that a seed keeps its split.
    random = ModuleView(module.numpy.random, RandomState=_RaggedRandomState)
    module.numpy = ModuleView(module.numpy, random=random)


@repairs('chainer_chemistry.dataset.preprocessors.wle_util')
@repairs('chainer_chemistry.dataset.preprocessors.wle_io')
@repairs('chainer_chemistry.dataset.converters.cgcnn_converter')
def arrays_are_ragged(module):
    """wle_util.py, wle_io.py and cgcnn_converter.py: arrays are made of arrays of many shapes."""
    alias = 'np' if hasattr(module, 'np') else 'numpy'
    setattr(module, alias, ModuleView(numpy, array=_ragged_array))


# --- scikit-learn ---


@repairs('chainer_chemistry.training.extensions.roc_auc_evaluator')
def roc_auc_of_one_class_raises(module):
    """training/extensions/roc_auc_evaluator.py: relies on scikit-learn's ValueError."""
    # For labels of one class scikit-learn >= 1.6 warns and returns NaN, so that
    # ``raise_value_error=True`` raised nothing and False logged nothing.
    metrics = module.metrics

    def roc_auc_score(y_true, y_score, **kwargs):
        if len(numpy.unique(y_true)) == 1:
            raise ValueError(
                'Only one class present in y_true. ROC AUC score is not defined in that case.'
            )
        return metrics.roc_auc_score(y_true, y_score, **kwargs)

    module.metrics = ModuleView(metrics, roc_auc_score=roc_auc_score)


# --- a copy of the loss to the host in every step ---


def _convert_to_scalar(self, value):
    """Convert a reported value to a scalar, but leave CuPy arrays on their device."""
    # Arrays of one element become zero-dimensional: the reporter accumulates them on the device,
    # and LogReport reads them when it logs, so nothing is synchronised here.
    from chainer import Variable
    from chainer.backends import cuda

    if isinstance(value, Variable):
        value = value.array
    if numpy.isscalar(value):
        return value
    if isinstance(value, cuda.ndarray):
        return value.reshape(())
    return cuda.to_cpu(value).item()


@repairs('chainer_chemistry.models.prediction.regressor')
@repairs('chainer_chemistry.models.prediction.classifier')
def values_are_reported_lazily(module):
    """regressor.py and classifier.py copy a value to the host for numpy.asscalar (gone in 1.23)."""
    kind = module.Classifier if hasattr(module, 'Classifier') else module.Regressor
    kind._convert_to_scalar = _convert_to_scalar


# --- nodes that do nothing ---


@repairs('chainer_chemistry.links.array.shape_transformer_to_2d')
def scaler_leaves_matrices_as_they_are(module):
    """links/array/shape_transformer_to_2d.py: three nodes to turn a matrix into the same matrix."""
    # A regressor with a StandardScaler scales three times a step, which took a twentieth of the
    # step's time for small molecules on a CPU.
    kind = module.ShapeTransformerTo2D
    transform, inverse_transform = kind.transform, kind.inverse_transform

    def is_matrix(self, shape):
        return shape is not None and len(shape) == 2 and self.axis in (1, -1)

    def transform_others(self, x):
        if not is_matrix(self, x.shape):
            return transform(self, x)
        self.original_shape = x.shape
        return module.chainer.as_variable(x)

    def inverse_transform_others(self, x):
        if not is_matrix(self, self.original_shape) or x.ndim != 2:
            return inverse_transform(self, x)
        return module.chainer.as_variable(x)

    kind.transform, kind.inverse_transform = transform_others, inverse_transform_others


# --- a method that is called but missing ---


@repairs('chainer_chemistry.links.update.gnn_film_update')
def gnn_film_update_has_no_state(module):
    """links/update/gnn_film_update.py: lacks the reset_state that GNNFiLM.reset_state calls."""
    if not hasattr(module.GNNFiLMUpdate, 'reset_state'):
        module.GNNFiLMUpdate.reset_state = lambda self: None


# --- MPNN, which examples/own_dataset offers, but nothing sets up ---


@repairs('chainer_chemistry.dataset.preprocessors')
def mpnn_has_a_preprocessor(module):
    """dataset/preprocessors/__init__.py: preprocess_method_dict lacks 'mpnn'."""
    module.preprocess_method_dict.setdefault('mpnn', module.GGNNPreprocessor)


@repairs('chainer_chemistry.dataset.converters')
def mpnn_has_a_converter(module):
    """dataset/converters/__init__.py: converter_method_dict lacks 'mpnn'."""
    module.converter_method_dict.setdefault('mpnn', module.concat_mols)


@repairs('chainer_chemistry.models.prediction.set_up_predictor')
def mpnn_can_be_set_up(module):
    """models/prediction/set_up_predictor.py: does not know the method 'mpnn'."""
    set_up = module.set_up_predictor
    signature = inspect.signature(set_up)

    @functools.wraps(set_up)
    def set_up_predictor(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = types.SimpleNamespace(**bound.arguments)
        if options.method != 'mpnn':
            return set_up(*args, **kwargs)
        from chainer_chemistry.models.mpnn import MPNN

        print('Set up MPNN predictor...')
        head = module.MLP(out_dim=options.class_num, hidden_dim=options.n_unit)
        model = MPNN(
            out_dim=options.n_unit,
            hidden_channels=options.n_unit,
            n_update_layers=options.conv_layers,
            n_atom_types=options.n_atom_types,
            **options.conv_kwargs or {},
        )
        return module.GraphConvPredictor(model, head, options.label_scaler, options.postprocess_fn)

    module.set_up_predictor = set_up_predictor


# --- a table that all data sets of graphs share ---


@repairs('chainer_chemistry.dataset.graph_dataset.base_graph_dataset')
def graph_datasets_have_their_own_features(module):
    """dataset/graph_dataset/base_graph_dataset.py: register_feature adds to lists of the class."""
    # Because all data sets share these lists, a SparseGraphDataset cannot convert a batch once a
    # PaddingGraphDataset was made.
    init = module.BaseGraphDataset.__init__

    @functools.wraps(init)
    def init_with_own_lists(self, *args, **kwargs):
        self._feature_entries, self._feature_batch_method = [], []
        init(self, *args, **kwargs)

    module.BaseGraphDataset.__init__ = init_with_own_lists


# --- GIN's first_mlp, which is never called ---


def zero_unused(linear, n_inputs):
    """Give a layer that is never called weights of 0: None would break optimizers and snapshots.

    Links other than linear layers are left alone.
    """
    import chainer

    if hasattr(linear, 'out_size') and linear.W.array is None:
        linear.W.initializer = chainer.initializers.Zero()
        linear.W.initialize((linear.out_size, n_inputs))
        linear.cleargrads()


def _initialize_first_mlp(model_class, get_atoms):
    forward = model_class.__call__

    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        # Atom ids go through the embedding. Only GINSparse passes features through first_mlp,
        # which then takes its shapes from them.
        if get_atoms(*args, **kwargs).dtype == numpy.int32:
            for link in self.first_mlp.links():
                zero_unused(link, self.hidden_channels)
        return forward(self, *args, **kwargs)

    model_class.__call__ = call


@repairs('chainer_chemistry.models.gin')
def gin_initializes_first_mlp(module):
    """models/gin.py: ``first_mlp`` is registered but not called, so its weights stay None."""
    # Then the .npz file holds a pickled object, ``optimizer.update`` without ``cleargrads`` fails,
    # and the trainer's snapshot cannot be resumed (KeyError ``first_mlp/layers/0/W/m``). Here the
    # weights become zeros in the first forward pass, when the other weights without a shape get
    # theirs. Files in which these weights are None load as before.
    _initialize_first_mlp(module.GIN, lambda atom_array, *_, **__: atom_array)
    _initialize_first_mlp(module.GINSparse, lambda sparse_batch, *_, **__: sparse_batch.x)


# --- network graphs ---

# Their folders have no __init__.py, so that upstream's setup.py left them out of the wheel.
for _name in (
    'chainer_chemistry.dataset.networkx_preprocessors',
    'chainer_chemistry.datasets.citation_network',
    'chainer_chemistry.datasets.reddit',
):
    explain_absence(
        _name,
        'the wheel of Chainer Chemistry lacks it. Clone '
        'https://github.com/chainer/chainer-chemistry and put that folder first on PYTHONPATH',
    )
