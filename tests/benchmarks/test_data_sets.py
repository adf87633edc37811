"""Molecules of the benchmarks equal the molecules that Chainer Chemistry parses."""

import numpy
import pytest

pytest.importorskip('rdkit')

from benchmarks import data_sets  # NOQA: E402
from chainer_chemistry.dataset.parsers import SmilesParser  # NOQA: E402
from chainer_chemistry.dataset.preprocessors import preprocess_method_dict  # NOQA: E402
from chainer_chemistry.dataset.preprocessors import wle_atom_array_update  # NOQA: E402
from rdkit import Chem  # NOQA: E402


@pytest.mark.parametrize('method', ['rsgcn', 'relgcn', 'nfp'])
def test_dense_ones_are_those_of_its_parser(method):
    smiles, labels, _ = data_sets.tox21(limit=12)
    dense, sparse = data_sets.of_smiles(smiles, labels, method)
    expected = SmilesParser(preprocess_method_dict[method]()).parse(smiles)['dataset']
    assert len(dense) == len(sparse) == len(expected)
    for one, other, label in zip(dense, expected, labels):
        for a, b in zip(one, (*other, label), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            numpy.testing.assert_allclose(a, b, rtol=1e-6)


def test_generated_molecules_have_the_sizes_of_tox21():
    smiles, labels, _ = data_sets.tox21(limit=2000)
    sizes = [Chem.MolFromSmiles(text).GetNumAtoms() for text in smiles]
    assert 15 <= numpy.median(sizes) <= 17 and 17 < numpy.mean(sizes) < 20
    assert 50 < numpy.percentile(sizes, 99) < 75
    assert max(sizes) <= data_sets.TOX21_LARGEST
    assert labels.shape == (2000, 12) and set(labels.ravel()) == {-1, 0, 1}


@pytest.mark.parametrize('method', ['nfp', 'relgcn'])
@pytest.mark.parametrize('with_atom', [True, False])
def test_weisfeiler_lehman(method, with_atom):
    """Labels equal Chainer Chemistry's up to their numbering."""
    smiles, labels, _ = data_sets.tox21(limit=20)
    dense, _ = data_sets.of_smiles(smiles + ['[Na+].[Cl-]'], [*labels, labels[0]], method)
    atoms, matrices, _ = dense.get_datasets()
    (expected,), frequencies = wle_atom_array_update.list_all_expanded_labels(
        [atoms], [[matrix.swapaxes(0, 1) for matrix in matrices]], with_atom
    )
    found, n_labels = data_sets.weisfeiler_lehman(dense, with_atom)
    assert list(map(len, found)) == list(map(len, atoms))
    numbers = {name: i for i, name in enumerate(frequencies)}  # in the order of appearance
    assert n_labels == len(numbers) > 5
    for one, other in zip(found, expected):
        assert one.tolist() == [numbers[name] for name in other]
