"""Chainer Chemistry's saliency calculators, and inputs that are kept, on sparse batches.

Upstream's code takes arrays with a row for each molecule, padded to one number of atoms. What it
calculates here for the rows of a batch is given back in that shape.
"""

import functools
import itertools
import re
import sys

import numpy

import chainer
from chainer.backends import cuda
from chainer_chemistry.models.prediction import base

from chainer_bspmm.compat import hooks
from chainer_bspmm.models.sparse_model import SparseModel
from chainer_bspmm.sparse.batch import Batch

# Links of a model that give an array of molecules; others give one of atoms.
OF_MOLECULES = re.compile(r'readout(_layers/\d+(/linear\d)?)?$|super')


def take_sparse_batches():
    """Let upstream's calculators, and ``predict(retain_inputs=True)``, take sparse batches."""
    kind = base.BaseForwardModel
    kind._forward = _keeping_inputs(kind._forward)
    calculators = 'chainer_chemistry.saliency.calculator.'
    for name, repair in (
        ('base_calculator', _repair_base),
        ('occlusion_calculator', _repair_occlusion),
    ):
        hooks.repairs(calculators + name)(repair)
        if calculators + name in sys.modules:
            repair(sys.modules[calculators + name])


class Places:
    """Where the rows of a batch are in an array of molecules that are padded to N atoms.

    Args:
        adj (Batch): the batch, of any layout.

    Attributes:
        n_atoms (array): (n_graphs,) atoms of each molecule, with phantom atoms in a padded batch.
        layout (str): the batch's.
        is_clear (bool): whether the length of an array tells rows from molecules. It does not
            where each molecule has one atom.
    """

    def __init__(self, adj):
        self.layout = adj.layout
        offsets = cuda.to_cpu(adj.row_offsets)
        self._n_rows, self._shape = int(offsets[-1]), (adj.n_graphs, adj.max_rows)
        graph = numpy.repeat(numpy.arange(adj.n_graphs), numpy.diff(offsets))
        atom = numpy.arange(self._n_rows) - offsets[graph]
        self._rows = numpy.arange(self._n_rows)
        self._phantoms = None
        if adj.layout == 'folded':
            # The last row of a molecule stands for all of its phantom atoms.
            last, weights = offsets[1:] - 1, cuda.to_cpu(adj.row_weights)
            self._rows = numpy.delete(self._rows, last)
            n = int((numpy.diff(offsets) - 1 + weights[last]).max(initial=0))
            self._shape = adj.n_graphs, n
            self._phantoms = last, weights[last]
        self._graph, self._atom = graph[self._rows], atom[self._rows]
        self.n_atoms = numpy.bincount(self._graph, minlength=adj.n_graphs)
        self.is_clear = self._n_rows != adj.n_graphs

    def of_graphs(self):
        """Return the rows (array) of each molecule's atoms."""
        return [self._rows[self._graph == i] for i in range(self._shape[0])]

    def are_rows(self, array, otherwise):
        """Return whether an array has a row for each row of the batch.

        Args:
            otherwise (bool): the answer where its length does not tell.
        """
        is_long = array.ndim > 0 and len(array) == self._n_rows
        return is_long and (self.is_clear or otherwise)

    def spread(self, rows, phantoms=False):
        """Return (n_graphs, N, ...) of (n_rows, ...), with zeros where there is no atom.

        Args:
            phantoms (bool): whether rows are sums over phantom atoms, each of which gets its share.
        """
        xp = cuda.get_array_module(rows)
        found = xp.zeros(self._shape + rows.shape[1:], rows.dtype)
        if phantoms and self._phantoms is not None:
            last, weights = (xp.asarray(array) for array in self._phantoms)
            shape = (len(last),) + (1,) * (rows.ndim - 1)
            found[...] = (rows[last] / xp.maximum(weights, 1).reshape(shape))[:, None]
        found[xp.asarray(self._graph), xp.asarray(self._atom)] = rows[xp.asarray(self._rows)]
        return found

    def of_adjacency(self, adj):
        """Return the batch as an array (n_graphs, ..., N, N) on the host, without phantom rows."""
        dense, n = cuda.to_cpu(adj.to_dense()), self._shape[1]
        found = numpy.zeros(dense.shape[:-2] + (n, n), dense.dtype)
        known = min(n, dense.shape[-1])
        found[..., :known, :known] = dense[..., :known, :known]
        return found

    def gather(self, padded, rows):
        """Return a copy of `rows`, (n_rows, ...), with the atoms of (n_graphs, N, ...)."""
        xp = cuda.get_array_module(rows)
        found = rows.copy()
        found[xp.asarray(self._rows)] = padded[xp.asarray(self._graph), xp.asarray(self._atom)]
        return found


def _batch_in(inputs):
    """Return the sparse batch among inputs, or None."""
    return next((value for value in inputs if isinstance(value, Batch)), None)


def _on_host(inputs):
    """Return the `Places` of a batch, None for upstream's, and its inputs as arrays on the host."""
    adj = _batch_in(inputs)
    places = None if adj is None else Places(adj)
    return places, [
        places.of_adjacency(value) if isinstance(value, Batch) else cuda.to_cpu(_bare(value))
        for value in inputs
    ]


def _padded(kept):
    """Return inputs of batches, of :func:`_on_host`, as upstream has them: of molecules, padded."""
    places = [of for of, _ in kept]
    return [
        _stacked(_of_column(places, arrays, i == 0))
        for i, arrays in enumerate(zip(*[arrays for _, arrays in kept]))
    ]


def _of_column(places, arrays, are_atoms):
    """Return the arrays of one input, padded where they have a row for each atom."""
    # The inputs of a padded batch are padded.
    pairs = [
        (None if of is None or of.layout == 'padded' else of, array)
        for of, array in zip(places, arrays)
    ]
    # Where no batch tells: integers are labels of atoms, what else there is belongs to molecules.
    of_atoms = are_atoms or (arrays[0].ndim == 1 and arrays[0].dtype.kind == 'i')
    told = (of.are_rows(array, False) for of, array in pairs if of is not None and of.is_clear)
    if not next(told, of_atoms):
        return arrays
    return [array if of is None else of.spread(array) for of, array in pairs]


def _bare(value):
    return value.array if isinstance(value, chainer.Variable) else value


def _keeping_inputs(forward):
    """Wrap a method `_forward` of upstream's, whose `retain_inputs` stacks arrays."""

    @functools.wraps(forward)
    def _forward(self, data, *args, retain_inputs=False, preprocess_fn=None, **kwargs):
        if not retain_inputs:
            return forward(self, data, *args, preprocess_fn=preprocess_fn, **kwargs)
        kept = []

        def keep(*inputs):
            if preprocess_fn is not None:
                inputs = preprocess_fn(*inputs)
                inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            kept.append(_on_host(inputs))
            return inputs

        result = forward(self, data, *args, preprocess_fn=keep, **kwargs)
        self.inputs = _padded(kept)
        return result

    return _forward


def _stacked(arrays):
    """Stack arrays of several batches, padded to the largest."""
    shape = numpy.max([array.shape[1:] for array in arrays], axis=0).astype(int).tolist()
    found = numpy.zeros((sum(map(len, arrays)), *shape), arrays[0].dtype)
    start = 0
    for array in arrays:
        found[(slice(start, start + len(array)), *map(slice, array.shape[1:]))] = array
        start += len(array)
    return found


def _repair_base(module):
    """saliency/calculator/base_calculator.py: inputs become variables, results are of molecules."""
    to_variable = module._to_variable
    module._to_variable = lambda x: x if isinstance(x, Batch) else to_variable(x)
    kind = module.BaseCalculator
    kind._forward = _keeping_inputs(_of_molecules(kind._forward))
    get_target_var = kind.get_target_var

    @functools.wraps(get_target_var)
    def checked(self, inputs):
        target = get_target_var(self, inputs)
        if target is None and _batch_in(inputs) is not None:
            raise ValueError(
                'target_extractor: %s is part of a larger operation on sparse batches, and is not '
                'called; expected an embedding, an update layer, a readout or a layer of an MLP'
                % type(self.target_extractor.target_link).__name__
            )
        return target

    kind.get_target_var = checked


class _Now:
    """What a calculator is about.

    Attributes:
        models (list of SparseModel): those that it looks into.
        places (Places or None): of its batch; None for upstream's.
        is_spread (bool): whether the result has the shape of molecules already.
    """

    def __init__(self, calculator):
        self.begin(None)
        self.models = [link for link in calculator.model.links() if isinstance(link, SparseModel)]
        target = getattr(calculator.target_extractor, 'target_link', None)
        self._is_input = target is None  # the first one
        self._is_of_atoms = any(
            link is target and not OF_MOLECULES.search(name)
            for model in self.models
            for name, link in model.namedlinks(skipself=True)
        )

    def begin(self, adj):
        self.places, self.is_spread = None if adj is None else Places(adj), False

    def are_rows(self, array):
        """Return whether the target, or what has its shape, is of atoms and to be padded."""
        if self.places is None:
            return False
        is_padded = self._is_input and self.places.layout == 'padded'
        of_atoms = self._is_input or self._is_of_atoms
        return self.places.are_rows(array, of_atoms and not is_padded)


def _of_molecules(forward):
    """Wrap `BaseCalculator._forward`: what is calculated for rows is given back for molecules."""

    @functools.wraps(forward)
    def _forward(self, data, *args, **kwargs):
        preprocess, postprocess = kwargs.get('preprocess_fn'), kwargs.get('postprocess_fn')
        sampler = kwargs.get('noise_sampler')
        now = self._now = _Now(self)

        def begin(*inputs):
            if preprocess is not None:
                inputs = preprocess(*inputs)
                inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            now.begin(_batch_in(inputs))
            return inputs

        def end(*outputs):
            if not now.is_spread:
                outputs = tuple(
                    now.places.spread(output, phantoms=True) if now.are_rows(output) else output
                    for output in outputs
                )
            return outputs if postprocess is None else postprocess(*outputs)

        kwargs.update(preprocess_fn=begin, postprocess_fn=end)
        if sampler is not None:
            kwargs['noise_sampler'] = _Sampler(sampler, now)
        active = chainer._get_link_hooks()
        before = dict(active)
        # Sampled with dropout, as in training, a model has not learned anything.
        learned = [(model, model.trained_with) for model in now.models]
        try:
            return forward(self, data, *args, **kwargs)
        finally:
            for model, trained_with in learned:
                model.trained_with = trained_with
            active.clear()  # upstream leaves its own where there is an error
            active.update(before)

    return _forward


class _Sampler:
    """A noise sampler that gets the atoms of one molecule at a time."""

    def __init__(self, sampler, now):
        self._sampler, self._now = sampler, now

    def sample(self, array):
        if not self._now.are_rows(array):
            return self._sampler.sample(array)
        noise = cuda.get_array_module(array).zeros_like(array)
        for rows in self._now.places.of_graphs():
            noise[rows] = self._sampler.sample(array[rows][None])[0]
        return noise


def _repair_occlusion(module):
    """saliency/calculator/occlusion_calculator.py: windows slide over the atoms of molecules."""
    kind = module.OcclusionCalculator
    compute = kind._compute_core

    @functools.wraps(compute)
    def _compute_core(self, *inputs):
        adj = _batch_in(inputs)
        if adj is None:
            return compute(self, *inputs)
        with chainer.using_config('enable_backprop', self.enable_backprop):
            result = self.eval_fun(*inputs)
        target = self.get_target_var(inputs)
        now, rows = self._now, target.array.copy()
        if not now.are_rows(rows):
            return compute(self, *inputs)
        places = now.places
        atoms, score = places.spread(rows), self.get_output_var(result).array
        xp = cuda.get_array_module(rows)
        shape = [
            size if axis in (0, *self.slide_axis) else 1 for axis, size in enumerate(atoms.shape)
        ]
        scores = xp.zeros(shape, xp.float32)
        ends = [atoms.shape[axis] - size + 1 for axis, size in zip(self.slide_axis, self.size)]
        for starts in itertools.product(*map(range, ends)):
            window = [slice(None)] * atoms.ndim
            for axis, size, start in zip(self.slide_axis, self.size, starts):
                window[axis] = slice(start, start + size)
            masked = atoms.copy()
            masked[tuple(window)] = 0
            difference = score - self._score_of(inputs, places.gather(masked, rows))
            if places.layout == 'packed' and 1 in self.slide_axis:
                # Alone, a molecule has no window that reaches past its last atom.
                difference[xp.asarray(places.n_atoms < window[1].stop)] = 0
            scores[tuple(window)] += difference.reshape((-1,) + (1,) * (atoms.ndim - 1))
        now.is_spread = True
        return (scores,)

    def _score_of(self, inputs, array):
        """Return the output where the target is `array`."""
        if self.target_extractor is None:
            inputs[0].array = array
        else:
            name = '/saliency/mask_target_var'
            self.target_extractor.add_process(
                name, lambda hook, args, target: setattr(target, 'array', array)
            )
        try:
            with chainer.using_config('enable_backprop', self.enable_backprop):
                return self.get_output_var(self.eval_fun(*inputs)).array
        finally:
            if self.target_extractor is not None:
                self.target_extractor.delete_process(name)

    kind._compute_core, kind._score_of = _compute_core, _score_of
