"""Comparisons of a batch's size are found in the source of a user's functions."""

import types

import pytest

from chainer_bspmm.training.size_branches import branch_on_size


def of_the_rows(h, adj):
    return h * 2 if adj.n_rows < 36 else h


def of_a_chain(h, adj):
    return h if 9 < adj.max_rows < 20 else h * 2


def of_a_length(atoms, adj):
    if len(atoms) > 36:
        atoms = atoms[:36]
    return atoms


def of_the_first_dimension(atoms, adj):
    return atoms.shape[0] == 36


def of_the_number_of_elements(atoms, adj):
    while atoms.size > 36:
        atoms = atoms[::2]


def of_a_variable(atoms, adj):
    n = len(atoms)
    return n < 36


def of_a_walrus(atoms, adj):
    return (n := len(atoms)) and n < 36


def of_a_product(atoms, adj):
    return 2 * len(atoms) < 36


def of_an_average(atoms, adj):
    return int(adj.n_rows / adj.n_graphs) > 36


def of_an_assigned_average(atoms, adj):
    mean = adj.nnz // adj.n_graphs
    return mean + 1 > 36


def by_a_minimum(atoms, adj):
    return min(adj.nnz, 36)


def of_a_minimum(atoms, adj):
    return max(adj.nnz, adj.n_rows) == 36


def in_an_inner_function(atoms, adj):
    def inner():
        return adj.longest > 36

    return inner()


def of_an_annotated_variable(atoms, adj):
    n: int = len(atoms)
    return n < 36


def of_an_added_variable(atoms, adj):
    n = 0
    n += len(atoms)
    return n < 36


def of_unpacked_variables(atoms, adj, others):
    n, least = len(atoms), len(others)
    return n < least


def of_an_unpacked_shape(atoms, adj):
    n, _ = adj.shape
    return n < 36


def of_the_unpacked_columns(atoms, adj):
    _, m = adj.shape
    return m < 36


def of_any_entries(atoms, adj):
    return None if len(adj.data) == 0 else adj


def of_another_name(atoms, adj):
    x = atoms.array
    return len(x) < 36


def of_all_arguments(*inputs):
    return len(inputs[0]) < 36


def of_unpacked_arguments(self, *inputs):
    atoms, adj, t = inputs
    return len(atoms) < 36 < len(t)


def of_a_quotient(atoms, adj):
    return 1 if len(atoms) // 36 else 0


def of_a_matched_quotient(atoms, adj):
    match len(atoms) // 36:
        case 0:
            return 1


def of_entries(atoms, adj):
    return 1 if adj.nnz else 0


@pytest.mark.parametrize(
    'function, text',
    [
        (of_the_rows, 'adj.n_rows < 36'),
        (of_a_chain, '9 < adj.max_rows < 20'),
        (of_a_length, 'len(atoms) > 36'),
        (of_the_first_dimension, 'atoms.shape[0] == 36'),
        (of_the_number_of_elements, 'atoms.size > 36'),
        (of_a_variable, 'n < 36'),
        (of_a_walrus, 'n < 36'),
        (of_a_product, '2 * len(atoms) < 36'),
        (of_an_average, 'int(adj.n_rows / adj.n_graphs) > 36'),
        (of_an_assigned_average, 'mean + 1 > 36'),
        (by_a_minimum, 'min(adj.nnz, 36)'),
        (of_a_minimum, 'max(adj.nnz, adj.n_rows) == 36'),
        (in_an_inner_function, 'adj.longest > 36'),
        (lambda atoms, adj: len(atoms) < 36, 'len(atoms) < 36'),
        (of_an_annotated_variable, 'n < 36'),
        (of_an_added_variable, 'n < 36'),
        (of_unpacked_variables, 'n < least'),
        (of_an_unpacked_shape, 'n < 36'),
        (of_the_unpacked_columns, 'm < 36'),
        (lambda atoms, adj: adj.shape[1] < 36, 'adj.shape[1] < 36'),
        (lambda atoms, adj: len(adj.indices) < 36, 'len(adj.indices) < 36'),
        (lambda atoms, adj: adj.row_weights.size < 36, 'adj.row_weights.size < 36'),
        (of_any_entries, 'len(adj.data) == 0'),
        (of_another_name, 'len(x) < 36'),
        (of_all_arguments, 'len(inputs[0]) < 36'),
        (of_unpacked_arguments, 'len(atoms) < 36 < len(t)'),
        (of_a_quotient, 'len(atoms) // 36'),
        (of_a_matched_quotient, 'len(atoms) // 36'),
        (of_entries, 'adj.nnz'),
    ],
)
def test_comparisons(function, text):
    assert branch_on_size(function.__code__, takes_batch=True) == text


def of_two_sizes(atoms, adj):
    assert len(atoms) == adj.n_rows


def of_channels(h, adj):
    return h.shape[1] == 8


def of_classes(y, t):
    return t.shape[1] == 12


def of_any_features(h, adj):
    return len(h.data) == 0


def of_the_number_of_molecules(h, adj):
    return adj.n_graphs > 36


def of_something_else(self, h, adj):
    return len(self.layers) > 2 or self.size > 3


def in_a_shape(h, adj):
    return h.reshape(adj.n_rows, -1)


def of_an_array_of_a_size(h, adj):
    y = h.reshape(adj.n_rows, -1)
    return y is not None and y.dtype == 'f'


def of_labels(atoms, adj, t):
    return len(t) > 2


def of_columns(*labels):
    return len(labels) > 2


def of_labels_of_all_arguments(*inputs):
    *_, t = inputs
    return len(t) > 2 or len(inputs[2]) > 2


def of_any_rows(atoms, adj):
    assert len(atoms) > 0 and adj.n_rows != 0
    return adj if len(atoms) else None


def of_a_number_of_the_users(self, h, adj):
    return self.n_rows < 36


@pytest.mark.parametrize(
    'function',
    [
        of_two_sizes,
        of_channels,
        of_classes,
        of_any_features,
        of_the_number_of_molecules,
        of_something_else,
        in_a_shape,
        of_an_array_of_a_size,
        of_labels,
        of_columns,
        of_labels_of_all_arguments,
        of_any_rows,
        of_a_number_of_the_users,
    ],
)
def test_other_comparisons(function):
    assert branch_on_size(function.__code__, takes_batch=True) is None


def test_arguments_that_are_no_batch():
    assert branch_on_size(of_a_length.__code__, takes_batch=False) is None
    assert branch_on_size(of_the_rows.__code__, takes_batch=False) == 'adj.n_rows < 36'


def test_code_without_a_source():
    module = types.ModuleType('made')
    exec('def forward(atoms, adj): return adj.n_rows < 36', vars(module))
    assert branch_on_size(module.forward.__code__, takes_batch=True) is None


def test_a_source_that_is_no_python(tmp_path):
    path = tmp_path / 'template.py'
    path.write_text('def forward(atoms, adj): return adj.n_rows < {{ n }} {%')
    module = types.ModuleType('made')
    code = compile('def forward(atoms, adj): return adj.n_rows < 36', str(path), 'exec')
    exec(code, vars(module))
    assert branch_on_size(module.forward.__code__, takes_batch=True) is None
