"""`captured_predict`, compared with the model's own prediction of each molecule."""

import itertools
import os
import re
import types
import warnings
from typing import Any

import numpy
import pytest

import chainer_bspmm
import chainer
from chainer import functions
from chainer.backends import cuda
from chainer_chemistry.dataset.converters import concat_mols as dense_concat_mols
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.dataset import DeviceDataset, smiles as parsing, to_sparse, workers
from chainer_bspmm.dataset.batch_form import Capacity
from chainer_bspmm.training import captured_predict, prediction, StepDiffers
from tests.support import relative_error
from tests.support.processes import forked_processes, is_gone
from tests.support.training import counting, HOST, make_model, mean_of_rows, MODELS, molecules
from tests.support.training import hidden, RELATIONS, Row, three_columns
from tests.training import host_graphs

SMILES = [
    'C',
    'CCO',
    'c1ccccc1',
    'CC#N',
    'C1CC',
    'OCC(O)C(O)C(O)C(O)CO',
    'CN(C)(C)C',
    'CC(C)(C)c1ccc(O)cc1',
    'nonsense',
    'F/C=C/F',
]
BAD = [4, 6, 8]  # indices of the SMILES that RDKit cannot parse


def on(device, model):
    """Move a model to a device, make all of its parameters, and return it."""
    examples = molecules(3, RELATIONS.get(getattr(model, 'made_of', None), 1))
    with chainer.using_config('train', False):
        model.predictor(*chainer_bspmm.concat_mols(examples)[:2])
    model.to_device(device)
    device.use()
    return model


def model_of(device, name='RSGCN', **kwargs):
    model = make_model(name, **kwargs)
    model.made_of = name
    return on(device, model)


def expected_of(model, data, postprocess_fn=None):
    """Predict each molecule alone, in the order of the data."""

    def predictor(atoms, adj, *labels):
        return model.predictor(atoms, adj)

    with chainer.no_backprop_mode(), chainer.using_config('train', False):
        return model._forward(
            data, predictor, 1, chainer_bspmm.concat_mols, postprocess_fn=postprocess_fn
        )


def collected(predictions):
    """Return all indices, values and failures."""
    index, values, failures = zip(*predictions)
    values = numpy.concatenate([v for v in values if len(v)])
    return numpy.concatenate(index), values, list(itertools.chain(*failures))


def values_of(model, data, **options):
    """Return all values, predicted in batches of 8."""
    return collected(captured_predict(model, data, **{'batch_size': 8, **options}))[1]


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings('error', 'captured_predict')
        yield


@pytest.fixture
def children(monkeypatch):
    """Function that returns the forked processes of the test that still run."""
    pids = forked_processes(monkeypatch)
    return lambda: [pid for pid in pids if not is_gone(pid)]


@pytest.mark.parametrize('name', MODELS)
def test_as_each_molecule_alone(device, prediction_graphs, name, no_warnings):
    model = model_of(device, name)
    examples = molecules(83, RELATIONS.get(name, 1))
    data = to_sparse(examples[::-1])[::-1]
    converter = chainer_bspmm.CSRConverter('packed')
    parts = list(captured_predict(model, data, device, batch_size=8, converter=converter))
    assert [len(part.index) for part in parts] == [8] * 10 + [3]
    assert all(type(part.values) is numpy.ndarray for part in parts)  # no views
    index, values, failures = collected(parts)
    numpy.testing.assert_array_equal(index, numpy.arange(83))
    assert values.shape == (83, 3) and values.dtype == numpy.float32 and not failures
    assert parts[0].values.flags.writeable
    assert relative_error(values, expected_of(model, examples)) < 1e-5
    assert prediction_graphs.n_captures >= 1 and prediction_graphs.n_launches >= 5


def test_padded_batches_of_growing_molecules_share_graphs(device, prediction_graphs, no_warnings):
    """A padded batch has as many rows a molecule as its largest molecule has atoms."""
    model = model_of(device, 'GGNN')
    data_set = to_sparse(sorted(molecules(160, 4), key=lambda example: len(example[0])))
    converter = chainer_bspmm.CSRConverter('padded')
    values = values_of(model, data_set, converter=converter)
    assert len(values) == 160 and prediction_graphs.n_captures <= 6


@pytest.mark.parametrize('trained_with', [None, ('packed', None), ('folded', 20)])
def test_the_layout_of_the_training(device, prediction_graphs, trained_with, no_warnings):
    model = model_of(device, 'GGNN')
    examples = molecules(40, 4)
    model.predictor.graph_conv.trained_with = trained_with
    layout, padded_to = trained_with or ('folded', None)
    converter = chainer_bspmm.CSRConverter(layout, padded_to)
    values = values_of(model, examples)
    given = collected(captured_predict(model, examples, batch_size=8, converter=converter))
    numpy.testing.assert_array_equal(values, given[1])
    other = chainer_bspmm.CSRConverter('folded', 21)
    model.predictor.graph_conv.trained_with = None  # a prediction on another layout would warn
    given = collected(captured_predict(model, examples, batch_size=8, converter=other))
    assert relative_error(values, given[1]) > 1e-3


@pytest.mark.gpu
def test_a_data_set_on_the_gpu(no_warnings):
    device = chainer.get_device('@cupy:0')
    model = model_of(device)
    examples = molecules(200)
    data = DeviceDataset(examples, 0)
    for part, order in ((data, slice(None)), (data[50:170], slice(50, 170))):
        _, values, _ = collected(captured_predict(model, part, batch_size=16))
        assert relative_error(values, expected_of(model, examples[order])) < 1e-5


def test_on_the_cpu(no_warnings):
    """A model may return the same array at every call."""
    model = model_of(HOST)
    examples = molecules(24)
    scores = numpy.zeros(8, 'f')

    def predict(atoms, adj):
        scores[...] = model.predictor(atoms, adj).array[:, 0]
        return scores

    for data in (examples, to_sparse(examples)):
        expected = expected_of(model, data)
        assert relative_error(values_of(model, data), expected) < 1e-5
        values = values_of(model, data, predict=predict)
        assert relative_error(values, expected[:, 0]) < 1e-5


def test_two_at_once(device, prediction_graphs, no_warnings):
    model = model_of(device)
    data = to_sparse(molecules(160))
    parts = (data[:80], data[80:])
    both = zip(*(captured_predict(model, part, batch_size=8) for part in parts))
    for part, actual in zip(parts, zip(*both)):
        assert relative_error(collected(actual)[1], expected_of(model, part)) < 1e-5


def test_configuration_of_the_caller(device, prediction_graphs):
    """Between batches the configuration is the caller's, who may train meanwhile."""
    model = model_of(device)
    data = to_sparse(molecules(64))
    current = cuda.cupy.cuda.get_current_stream().ptr if device.xp is not numpy else None
    for _ in captured_predict(model, data, batch_size=8):
        assert chainer.config.train and chainer.config.enable_backprop
        if current is not None:
            assert cuda.cupy.cuda.get_current_stream().ptr == current


def test_parameters_changed_in_place_between_batches(device, prediction_graphs):
    model = model_of(device)
    data = to_sparse(molecules(4) * 24)  # equal batches
    predictions = captured_predict(model, data, batch_size=8)
    seen = [next(predictions).values for _ in range(6)]
    assert prediction_graphs.n_captures == 1
    n_launches = prediction_graphs.n_launches
    for param in model.params():
        param.array *= 0.5
    rest = [part.values for part in predictions]
    assert prediction_graphs.n_captures == 1 and prediction_graphs.n_launches > n_launches
    # The next batch had already been launched with the old parameters.
    numpy.testing.assert_array_equal(rest[0], seen[-1])
    assert relative_error(numpy.concatenate(rest[1:]), expected_of(model, data)[56:]) < 1e-5


def test_an_attribute_that_changes(device, prediction_graphs, no_warnings):
    row = Row(lambda link, *batch: three_columns(link, *batch) * (1.0 + link.counter))
    model = on(device, Regressor(row))
    data = to_sparse(molecules(4) * 40)
    values = []
    for i, part in enumerate(captured_predict(model, data, batch_size=8)):
        values.append(part.values)
        if i == 9:
            model.predictor.counter = 1  # the next batch has been launched already
    assert prediction_graphs.n_captures == 2
    assert relative_error(values[11], 2 * values[0]) < 1e-5
    assert relative_error(values[-1], 2 * values[0]) < 1e-5


CLASSES = molecules(40, classes=True)


@pytest.mark.parametrize(
    'postprocess_fn, applied',
    [
        (None, functions.softmax),  # a classifier's own
        (functions.sigmoid, functions.sigmoid),
        (functions.identity, None),
    ],
)
def test_postprocessing(device, prediction_graphs, postprocess_fn, applied):
    model = model_of(device, classes=True)
    values = values_of(model, to_sparse(CLASSES), postprocess_fn=postprocess_fn)
    assert relative_error(values, expected_of(model, CLASSES, applied)) < 1e-5


def test_postprocessing_to_classes(device, prediction_graphs):
    model = model_of(device, classes=True)

    def likeliest(y):
        return functions.argmax(y, axis=1)

    classes = values_of(model, to_sparse(CLASSES), postprocess_fn=likeliest)
    assert classes.dtype.kind == 'i'
    numpy.testing.assert_array_equal(classes, expected_of(model, CLASSES).argmax(axis=1))


def test_one_number_for_each_molecule(device, prediction_graphs):
    model = model_of(device, classes=True)

    def first_column(atoms, adj):
        return model.predictor(atoms, adj)[:, 0]

    values = values_of(model, to_sparse(CLASSES), predict=first_column)
    assert values.shape == (40,)
    assert relative_error(values, expected_of(model, CLASSES)[:, 0]) < 1e-5


def picky(link, atoms, adj):
    if adj.has_spare:
        raise ValueError('so many rows?')
    return three_columns(link, atoms, adj)


_unseen = hidden(0)  # its value is not watched


def next_unseen():
    """Return a number that differs from the last one by more than rounding."""
    _unseen.value = _unseen.value % 7 + 1
    return _unseen.value


# Kind of model -> (its function, a pattern of the cause, whether a batch has the values of single
# molecules).
EAGER = {
    'of all rows': (
        mean_of_rows,
        'spare rows at the end of a batch, which belong to no molecule, change values: '
        r'values \(relative difference \d.\de-0\d\): a link or the loss treats every row as an '
        'atom',
        False,
    ),
    'failing with spare rows': (
        picky,
        r'/ \(Row\) cannot be captured: ValueError: so many rows\? \(%s, line \d+, in picky\)'
        % re.escape(__file__),
        True,
    ),
    'random': (
        lambda *given: three_columns(*given) * numpy.random.rand(),
        'the prediction changes the state of numpy.random at every run',
        False,
    ),
    'random by a generator that cannot be looked at': (
        lambda *given: three_columns(*given) * next_unseen(),
        r'two runs of one batch differ in values: values \(relative difference .+\): something in '
        'Python changes that is not watched, such as a counter, or the model draws random numbers '
        'in another way than chainer.functions.dropout',
        False,
    ),
    'changing with every batch': (
        counting,
        'the prediction changes the attribute counter of predictor at every run',
        True,
    ),
}


def assert_eager(device, function, cause, is_same=True):
    """Predict with a model around `function`; check that one warning has this cause (a pattern)."""
    model = on(device, Regressor(Row(function)))
    examples = molecules(8 * 40 if function is counting else 80)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        values = values_of(model, to_sparse(examples))
    texts = [str(w.message) for w in caught if w.filename == __file__]
    (text,) = (text for text in texts if 'predicts eagerly' in text)
    assert re.fullmatch('captured_predict predicts eagerly: ' + cause, text), text
    assert len(values) == len(examples)
    assert not is_same or relative_error(values, expected_of(model, examples)) < 1e-5


@pytest.mark.parametrize('name', EAGER)
def test_what_is_predicted_eagerly(device, prediction_graphs, name):
    assert_eager(device, *EAGER[name])


def test_a_hook_sees_every_call(device, prediction_graphs):
    with chainer.function_hooks.TimerHook():
        assert_eager(device, three_columns, 'the hook TimerHook has to see every call')


def test_what_fails_at_capture(monkeypatch):
    graphs = host_graphs.stand_in_for_prediction(monkeypatch)
    graphs.fail = RuntimeError('operation not permitted')
    cause = (
        r'the step cannot be captured: RuntimeError: operation not permitted '
        r'\(.*host_graphs.py, line \d+, in capture\)'
    )
    assert_eager(HOST, three_columns, cause)


def test_a_dense_model(device, prediction_graphs):
    from chainer_chemistry.models import RSGCN

    model = Regressor(RSGCN(3, hidden_channels=8))
    examples = molecules(40)
    model.predictor(*dense_concat_mols(examples[:2])[:2])
    model.to_device(device)
    message = (
        'captured_predict predicts eagerly: converter: expected a tuple (atoms, BatchedCSR, '
        'label...), as chainer_bspmm.concat_mols makes it, got (ndarray, ndarray, ndarray)'
    )
    with pytest.warns(UserWarning, match='^%s$' % re.escape(message)):
        values = values_of(model, examples, converter=dense_concat_mols)

    def inputs(batch, device):
        return dense_concat_mols(batch, device)[:2]

    expected = model.predict(examples, batchsize=8, converter=inputs)
    assert relative_error(values, expected) < 1e-5


def test_a_model_that_was_not_swapped(device):
    from chainer_chemistry.models.prediction import set_up_predictor

    model = set_up_predictor('rsgcn', 8, 2, 3)
    model.to_device(device)
    message = (
        'RSGCN of Chainer Chemistry takes dense adjacency matrices, got a BatchedCSR: call '
        'chainer_bspmm.sparsify(model) first, or use '
        'chainer_chemistry.dataset.converters.concat_mols as the converter. sparsify does not find '
        'links outside of init_scope: swap those separately'
    )
    with pytest.raises(TypeError, match='^%s$' % re.escape(message)):
        list(captured_predict(model, molecules(8), batch_size=4))


def test_what_is_compared():
    """Numbers may differ by rounding in the parameters' dtype, and one class in a hundred may."""
    model, half = chainer.Chain(), chainer.Chain()
    with half.init_scope():
        half.W = chainer.Parameter(numpy.ones(1, 'e'))
    values = numpy.linspace(1, 2, 200, dtype='f')
    values[:2] = numpy.nan, numpy.inf
    for factor, differ in ((1.0001, (False, False)), (1.01, (True, False)), (1.1, (True, True))):
        actual = values * numpy.float32(factor)
        found = [prediction._difference(actual, values, link) for link in (model, half)]
        assert differ == tuple(difference is not None for difference in found)
    classes = numpy.arange(200)
    for n_wrong, differs in ((0, None), (2, None), (3, '3 of 200 values')):
        wrong = numpy.where(classes < n_wrong, -1, classes)
        assert prediction._difference(classes, wrong, model) == differs
    assert 'float32 of shape (200,) instead of' in prediction._difference(values, classes, model)


@pytest.mark.parametrize(
    'names, difference',
    [('y', None), ('yz', "['y', 'z'] instead of ['y']"), ('', "[] instead of ['y']")],
)
def test_values_have_the_same_names(names, difference):
    work: Any = types.SimpleNamespace(_model=chainer.Chain())
    actual = {name: numpy.ones(3, 'f') for name in names}
    expected = {'y': numpy.ones(3, 'f')}
    assert prediction.Prediction.difference(work, actual, expected) == difference


@pytest.mark.parametrize('n_processes', (None, 2))
def test_smiles(device, prediction_graphs, n_processes):
    pytest.importorskip('rdkit')
    from chainer_bspmm.dataset import from_smiles

    model = model_of(device)
    smiles = SMILES * 60  # several chunks
    parsed = from_smiles(smiles, 'rsgcn', n_processes=1)
    message = (
        '^captured_predict: 180 of 600 SMILES could not be used, '
        "the first, at position 4: 'C1CC': RDKit cannot parse it$"
    )
    with pytest.warns(UserWarning, match=message):
        parts = list(
            captured_predict(
                model, iter(smiles), batch_size=16, method='rsgcn', n_processes=n_processes
            )
        )
    index, values, failures = collected(parts)
    assert {len(part.index) for part in parts[:-1]} == {16}
    numpy.testing.assert_array_equal(index, parsed.kept)
    assert failures == parsed.failures and all(failure.reason for failure in failures)
    assert [failure.position % 10 for failure in failures] == BAD * 60
    assert relative_error(values, expected_of(model, parsed.dataset)) < 1e-5
    assert prediction_graphs.n_launches > 5


@pytest.mark.skipif(not workers.CAN_FORK, reason='processes are not forked here')
@pytest.mark.parametrize('n_processes', (1, 2))
def test_molecules_that_end_their_process_are_failures(monkeypatch, children, n_processes):
    pytest.importorskip('rdkit')
    model = model_of(HOST)
    graph = parsing._graph
    monkeypatch.setattr(
        parsing,
        '_graph',
        lambda smiles, *args: os._exit(1) if 'N' in smiles else graph(smiles, *args),
    )
    smiles = ['CCO'] * 1200
    smiles[700] = 'CN' * 1500
    message = (
        '^captured_predict: 1 of 1200 SMILES could not be used, the first, at position 700: '
        "'%s: the process that parsed it died: exit status 1$" % ('CN' * 49 + 'C')
    )
    with pytest.warns(UserWarning, match=message):
        index, values, failures = collected(
            captured_predict(
                model, iter(smiles), method='rsgcn', batch_size=100, n_processes=n_processes
            )
        )
    assert index.tolist() == [i for i in range(1200) if i != 700]
    assert len(values) == 1199
    reason = 'the process that parsed it died: exit status 1'
    assert failures == [(700, smiles[700], reason)]
    assert not children()


@pytest.mark.filterwarnings('ignore:captured_predict')
def test_smiles_none_of_which_can_be_used():
    pytest.importorskip('rdkit')
    model = model_of(HOST)
    ((index, values, failures),) = captured_predict(model, ['nonsense', None], method='rsgcn')
    assert len(index) == len(values) == 0
    assert [failure.position for failure in failures] == [0, 1]
    # First only the last SMILES is bad, then so many that a batch has nothing else.
    for n_bad, shapes in ((1, [(250, 3), (0, 3)]), (350, [(250, 3), (0, 3), (0, 3)])):
        smiles = ['C'] * 250 + ['x'] * n_bad
        parts = list(captured_predict(model, smiles, method='rsgcn', batch_size=250))
        assert [part.values.shape for part in parts] == shapes
        positions = [failure.position for part in parts for failure in part.failures]
        assert positions == list(range(250, 250 + n_bad))
        assert all(part.index.dtype == numpy.int64 for part in parts)


def test_failures_alone_do_not_wait_for_a_full_batch():
    pytest.importorskip('rdkit')
    model = model_of(HOST)
    predictions = captured_predict(
        model, itertools.repeat('x'), method='rsgcn', batch_size=500, n_processes=1
    )
    positions = [failure.position for _ in range(2) for failure in next(predictions).failures]
    assert positions == list(range(1000))


@pytest.mark.filterwarnings('ignore:captured_predict')
def test_molecules_that_no_model_can_be_asked_about():
    pytest.importorskip('rdkit')
    model = on(HOST, make_model())
    smiles = ['C', '', '[Og]', '[Lv]', '[Ts]']
    for method in ('rsgcn', 'rsgcn_gwm'):
        ((index, _, failures),) = captured_predict(model, smiles, method=method, n_inputs=2)
        assert index.tolist() == [0, 3]
        assert [failure[::2] for failure in failures] == [
            (1, 'no atoms'),
            (2, 'atomic number 118, the models support those below 117'),
            (4, 'atomic number 117, the models support those below 117'),
        ]


@pytest.mark.parametrize('n_processes', (1, 2))
def test_an_error_comes_after_what_was_before(device, prediction_graphs, children, n_processes):
    pytest.importorskip('rdkit')
    model = model_of(device)

    def broken():
        yield from ['CCO'] * 610
        raise OSError('the disk is gone')

    def fails_at(n, *inputs):
        nonlocal n_batches
        n_batches += 1
        if n_batches > n:
            raise MemoryError('too large')
        return model.predictor(*inputs)

    n_batches = 0
    actual = []
    options = {'method': 'rsgcn', 'batch_size': 100, 'n_processes': n_processes}
    with pytest.raises(OSError, match='^the disk is gone$'):
        for part in captured_predict(model, broken(), **options):
            actual.append(part.index)
    numpy.testing.assert_array_equal(numpy.concatenate(actual), numpy.arange(610))
    assert not children()
    actual = []
    with pytest.raises(MemoryError, match='^too large$'):
        options['predict'] = lambda *inputs: fails_at(1, *inputs)
        for part in captured_predict(model, ['CCO'] * 600, **options):
            actual.append(part.index)
    assert len(actual) == 1
    assert not children()


def test_left_in_the_middle(monkeypatch, children):
    """No result stays on its way, and graphs, memory and processes are gone."""
    pytest.importorskip('rdkit')
    graphs = host_graphs.stand_in_for_prediction(monkeypatch)
    model = model_of(HOST)

    def predictions():
        return captured_predict(
            model, itertools.repeat('CCO'), method='rsgcn', batch_size=100, n_processes=2
        )

    with pytest.raises(KeyError):
        for n, _ in enumerate(predictions()):
            if n == 5:
                assert graphs.n_waiting and children()
                raise KeyError
    assert graphs.n_launches and not graphs.n_waiting and not children()
    assert graphs.most_waiting == 2  # the next batch is launched before one is waited for
    assert graphs.n_freed == 1
    closed = predictions()
    next(closed)
    closed.close()
    assert not graphs.n_waiting and not children()
    assert graphs.n_freed == 2


def test_smiles_without_end():
    """SMILES are read only a little ahead of the predictions."""
    pytest.importorskip('rdkit')
    n_read = 0

    def endless():
        nonlocal n_read
        while True:
            n_read += 1
            yield 'CCO'

    model = model_of(HOST)
    for n_processes in (1, 2):
        n_read = 0
        predictions = captured_predict(
            model, endless(), method='rsgcn', batch_size=100, n_processes=n_processes
        )
        got = [next(predictions).index]
        n_chunks = 1 if n_processes == 1 else n_processes * parsing.CHUNKS_AHEAD
        assert n_read == parsing.CHUNK * n_chunks
        got += [next(predictions).index for _ in range(29)]
        numpy.testing.assert_array_equal(numpy.concatenate(got), numpy.arange(3000))
        predictions.close()
        assert n_read < 3000 + 100 + 250 * parsing.CHUNKS_AHEAD * n_processes + 1000


def test_no_molecules(device, prediction_graphs):
    model = model_of(device)
    assert list(captured_predict(model, [])) == []
    assert list(captured_predict(model, [], method='rsgcn')) == []


@pytest.mark.parametrize(
    'arguments, message',
    [
        (
            {'data': ['C'], 'method': 'schnet'},
            "method: expected one of Chainer Chemistry's NFPPreprocessor, GINPreprocessor, "
            'RSGCNPreprocessor, GGNNPreprocessor, RelGCNPreprocessor, RelGATPreprocessor, '
            'GNNFiLMPreprocessor, NFPGWMPreprocessor, GINGWMPreprocessor, RSGCNGWMPreprocessor, '
            'GGNNGWMPreprocessor, got SchNetPreprocessor; if another one makes adjacency matrices, '
            'parse with it, then use to_sparse. Those of SchNet, WeaveNet, MEGNet and CGCNN make '
            'none; these models run unswapped',
        ),
        (
            {'data': 'CCO', 'method': 'rsgcn'},
            'data: expected a data set or an iterable of SMILES, got one string',
        ),
        ({'data': 5, 'method': 'rsgcn'}, 'data: expected an iterable of SMILES, got int'),
        ({'model': 1}, 'model: expected a chainer.Link, got int'),
        ({'data': 7, 'method': 'rsgcn'}, 'data: expected an iterable of SMILES, got int'),
        ({'data': ['C']}, 'data: expected a data set, or method= to go with SMILES, got list'),
        (
            {'data': iter(['C'])},
            'data: expected a data set, or method= to go with SMILES, got list_iterator',
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    """Arguments are checked by the call itself, not at the first batch."""
    arguments = {'model': model_of(HOST), 'data': molecules(4), **arguments}
    with pytest.raises(TypeError, match='^%s$' % re.escape(message)):
        captured_predict(**arguments)


@pytest.mark.parametrize('name', ['batch_size', 'n_inputs', 'n_processes'])
def test_numbers_below_one(name):
    data = {'data': ['C'], 'method': 'rsgcn'} if name == 'n_processes' else {'data': molecules(4)}
    with pytest.raises(ValueError, match='^%s: expected at least 1, got 0$' % name):
        captured_predict(model_of(HOST), **data, **{name: 0})


@pytest.mark.parametrize(
    'predict, error, message',
    [
        (
            lambda atoms, adj: atoms[:1],
            ValueError,
            'predict: expected a row for each of 4 molecules, got shape (1,)',
        ),
        (lambda *inputs: inputs, TypeError, 'predict: expected an array on @numpy, got tuple'),
    ],
)
def test_wrong_predictions(predict, error, message):
    with pytest.raises(error, match='^%s$' % re.escape(message)):
        list(captured_predict(model_of(HOST), molecules(4), predict=predict))


@pytest.mark.gpu
def test_another_device():
    with pytest.raises(ValueError, match="device: expected the model's, @numpy, got @cupy:0"):
        captured_predict(model_of(HOST), molecules(4), 0)


@pytest.mark.gpu
def test_memory_is_given_back():
    """Memory is given back after a complete run, and after one that was left in the middle."""
    device = chainer.get_device('@cupy:0')
    model = model_of(device)
    data = DeviceDataset(molecules(400), 0)
    pool = cuda.cupy.get_default_memory_pool()
    collected(captured_predict(model, data, batch_size=16))  # compiles
    pool.free_all_blocks()
    before = pool.used_bytes(), pool.total_bytes()
    for n_batches in (25, 9):
        predictions = captured_predict(model, data, batch_size=16)
        for _ in range(n_batches):
            next(predictions)
        predictions.close()
        del predictions
        pool.free_all_blocks()  # memory that CuPy keeps for later is not in use
        assert pool.used_bytes() <= before[0] and pool.total_bytes() <= before[1]


@pytest.mark.gpu
def test_on_streams_in_turn():
    cupy = cuda.cupy
    device = chainer.get_device('@cupy:0')
    model = model_of(device)
    examples = molecules(200)
    expected = expected_of(model, examples)
    predictions = captured_predict(model, DeviceDataset(examples, 0), batch_size=8)
    cupy.cuda.Device(0).synchronize()
    parts = []
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for stream in itertools.islice(itertools.cycle(streams), 25):
        with stream:
            parts.append(next(predictions))
            assert cupy.cuda.get_current_stream().ptr == stream.ptr
    assert next(predictions, None) is None
    assert relative_error(collected(parts)[1], expected) < 1e-5


@pytest.mark.parametrize('changes_at', (1, 5))
def test_a_prediction_that_changes(device, prediction_graphs, changes_at):
    """A change that is found before a wrong result was yielded is a warning, later an error."""
    model = model_of(device)
    data = molecules(4) * 24  # equal batches of 8
    seen = []
    n_seen = hidden(0)  # its value is not watched
    factor = host_graphs.read_at_capture(lambda: 2.0 if n_seen.value >= changes_at else 1.0)

    def predict(atoms, adj):
        return model.predictor(atoms, adj) * factor()

    def collect():
        for part in captured_predict(model, data, batch_size=8, predict=predict):
            seen.append(part.values)
            n_seen.value += 1

    differs = (
        'a replay of the captured prediction differs from an eager one in values '
        r'\(relative difference 5.0e-01\): it reads something from Python that has changed since '
        r'it was captured, and that is not watched \(docs/captured_training.md\)'
    )
    # One batch is launched ahead. The first is eager; replays 1, 2, 4 and 8 are checked.
    if changes_at == 1:
        message = '^captured_predict predicts eagerly: %s$' % differs
        with pytest.warns(UserWarning, match=message):
            collect()
        assert len(seen) == 12 and relative_error(seen[-1], 2 * seen[0]) < 1e-5
    else:
        with pytest.raises(StepDiffers, match='^%s$' % differs):
            collect()


@pytest.mark.parametrize(
    'is_known, layout, has_room',
    [(False, 'packed', True), (False, 'folded', True), (True, 'folded', False)]
    + [(True, 'padded', True)],
)
def test_buffers_have_room_for_larger_molecules_if_sizes_are_not_known(is_known, layout, has_room):
    """A dense example, and a padded one, may be larger than those of the first batch."""
    examples = molecules(4)
    predictor = prediction.Predictor(model_of(HOST), None, chainer_bspmm.concat_mols, 2, examples)
    need = Capacity(rows=10, entries=20, max_rows=5, max_entries=8, max_atom_id=7)
    batch: Any = types.SimpleNamespace(need=need, form=types.SimpleNamespace(layout=layout))
    larger = need._replace(max_rows=8, max_entries=16)
    found = predictor._need(to_sparse(examples) if is_known else examples, batch)
    assert found == (larger if has_room else need)
