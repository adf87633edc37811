"""Labels of atoms by their neighbours are Chainer Chemistry's, except for their numbers."""

import pytest

pytest.importorskip('rdkit')

from benchmarks import data_sets  # NOQA: E402
from chainer_chemistry.dataset.preprocessors import wle_atom_array_update  # NOQA: E402


@pytest.mark.parametrize('method', ['nfp', 'relgcn'])
@pytest.mark.parametrize('with_atom', [True, False])
def test_weisfeiler_lehman(method, with_atom):
    smiles, labels, _ = data_sets.tox21(limit=20)
    dense, _ = data_sets.of_smiles(smiles + ['[Na+].[Cl-]'], [*labels, labels[0]], method)
    atoms, matrices, _ = dense.get_datasets()
    (expected,), frequencies = wle_atom_array_update.list_all_expanded_labels(
        [atoms], [[matrix.swapaxes(0, 1) for matrix in matrices]], with_atom
    )
    found, n_labels = data_sets.weisfeiler_lehman(dense, with_atom)
    assert list(map(len, found)) == list(map(len, atoms))
    numbers = {name: i for i, name in enumerate(frequencies)}  # as they appear
    assert n_labels == len(numbers) > 5
    for one, other in zip(found, expected):
        assert one.tolist() == [numbers[name] for name in other]
