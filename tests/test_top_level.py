"""Names of the package, some of which are imported when they are first used."""

import difflib

import pytest

import chainer_bspmm
from chainer_bspmm import dataset, models, multi_node, training
from tests.support.processes import python

IMPORTED_AT_ONCE = [
    (dataset, 'CSRConverter'),
    (dataset, 'DeviceDataset'),
    (dataset, 'SparseDataset'),
    (dataset, 'concat_mols'),
    (dataset, 'from_smiles'),
    (dataset, 'to_sparse'),
    (models, 'densify'),
    (models, 'layout_of'),
    (models, 'sparsify'),
]
IMPORTED_LATER = [
    (multi_node, 'PartIterator'),
    (training, 'GraphUpdater'),
    (training, 'captured_predict'),
    (training, 'check_swap'),
    (training, 'run_node_classification_train'),
]


@pytest.mark.parametrize('package, name', IMPORTED_AT_ONCE + IMPORTED_LATER)
def test_name_is_that_of_its_package(package, name):
    assert getattr(chainer_bspmm, name) is getattr(package, name)


def test_names_are_found_by_mypy():
    assert chainer_bspmm.GraphUpdater is chainer_bspmm.training.GraphUpdater
    assert chainer_bspmm.captured_predict is chainer_bspmm.training.captured_predict
    assert chainer_bspmm.check_swap is chainer_bspmm.training.check_swap


@pytest.mark.parametrize('name', ['training', *(name for _, name in IMPORTED_LATER)])
def test_name_is_public(name):
    assert name in chainer_bspmm.__all__


@pytest.mark.parametrize('name', ['__version__', *chainer_bspmm.__all__])
def test_dir_lists(name):
    assert name in dir(chainer_bspmm)


@pytest.fixture(scope='module')
def printed():
    """Lines that a new process prints: modules that the import loads, then values of names."""
    code = """
import sys
import chainer_bspmm
print([name for name in sys.modules if name.startswith('chainer_bspmm.training')])
print([name for name in dir(chainer_bspmm) if name == 'training'])
print(chainer_bspmm.training.__name__)
print(chainer_bspmm.check_swap.__module__)
"""
    return python('-c', code).stdout.splitlines()


def test_import_leaves_training_for_later(printed):
    assert printed[0] == '[]'


def test_dir_lists_training_before_it_is_imported(printed):
    assert printed[1] == "['training']"


def test_training_is_imported_when_it_is_used(printed):
    assert printed[2:] == ['chainer_bspmm.training', 'chainer_bspmm.training.check_swap']


@pytest.mark.parametrize('package', [chainer_bspmm, multi_node])
def test_unknown_name_raises_as_in_any_module(package):
    with pytest.raises(AttributeError) as caught:
        getattr(package, 'sparsifi')  # noqa: B009
    assert str(caught.value) == f"module '{package.__name__}' has no attribute 'sparsifi'"


@pytest.mark.parametrize(
    'package, name, meant',
    [
        (chainer_bspmm, 'check_swop', 'check_swap'),
        (chainer_bspmm, 'trainings', 'training'),
        (multi_node, 'PartIteratr', 'PartIterator'),
    ],
)
def test_python_suggests_a_similar_name(package, name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(package, name)
    assert (caught.value.name, caught.value.obj) == (name, package)
    # Python compares with these names, even if their modules are not imported yet.
    assert meant in dir(package)
    assert difflib.get_close_matches(name, dir(package), 1) == [meant]
