"""Chainer Chemistry's saliency calculators, and inputs that are kept, on sparse batches.

Upstream's code takes arrays with a row for each molecule, padded to one number of atoms. What it
calculates here for the rows of a batch is given back in that shape.
"""

import functools
import itertools
import sys

import numpy

import chainer
from chainer.backends import cuda
from chainer_chemistry.models.prediction import base

from chainer_bspmm.compat import hooks
from chainer_bspmm.sparse.batch import Batch


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
    """

    def __init__(self, adj):
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

    def of_graphs(self):
        """Return the rows (array) of each molecule's atoms."""
        return [self._rows[self._graph == i] for i in range(self._shape[0])]

    def are_rows(self, array):
        """Return whether an array has a row for each row of the batch."""
        return array.ndim > 0 and len(array) == self._n_rows

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

    def gather(self, padded, rows):
        """Return a copy of `rows`, (n_rows, ...), with the atoms of (n_graphs, N, ...)."""
        xp = cuda.get_array_module(rows)
        found = rows.copy()
        found[xp.asarray(self._rows)] = padded[xp.asarray(self._graph), xp.asarray(self._atom)]
        return found


def _batch_in(inputs):
    """Return the sparse batch among inputs, or None."""
    return next((value for value in inputs if isinstance(value, Batch)), None)


def _padded(inputs):
    """Return inputs of a batch as upstream has them: arrays of molecules, padded."""
    adj = _batch_in(inputs)
    if adj is None:
        return [cuda.to_cpu(_bare(value)) for value in inputs]
    places, found = Places(adj), []
    for value in inputs:
        if isinstance(value, Batch):
            dense = cuda.to_cpu(value.to_dense())
            n = places._shape[1]  # without the row of phantom atoms
            found.append(dense[..., :n, :n] if adj.layout == 'folded' else dense)
            continue
        array = cuda.to_cpu(_bare(value))
        found.append(places.spread(array) if places.are_rows(array) else array)
    return found


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
            kept.append(_padded(inputs))
            return inputs

        result = forward(self, data, *args, preprocess_fn=keep, **kwargs)
        self.inputs = [_stacked(arrays) for arrays in zip(*kept)]
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
                'called; expected an embedding, an update layer, a readout or a linear layer'
                % type(self.target_extractor.target_link).__name__
            )
        return target

    kind.get_target_var = checked


def _of_molecules(forward):
    """Wrap `BaseCalculator._forward`: what is calculated for rows is given back for molecules."""

    @functools.wraps(forward)
    def _forward(self, data, *args, **kwargs):
        preprocess, postprocess = kwargs.get('preprocess_fn'), kwargs.get('postprocess_fn')
        sampler, now = kwargs.get('noise_sampler'), {}

        def begin(*inputs):
            if preprocess is not None:
                inputs = preprocess(*inputs)
                inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            adj = _batch_in(inputs)
            now['places'] = None if adj is None else Places(adj)
            return inputs

        def end(*outputs):
            places = now['places']
            if places is not None:
                outputs = tuple(
                    places.spread(output, phantoms=True) if places.are_rows(output) else output
                    for output in outputs
                )
            return outputs if postprocess is None else postprocess(*outputs)

        kwargs.update(preprocess_fn=begin, postprocess_fn=end)
        if sampler is not None:
            kwargs['noise_sampler'] = _Sampler(sampler, now)
        active = chainer._get_link_hooks()
        before = dict(active)
        try:
            return forward(self, data, *args, **kwargs)
        finally:  # upstream leaves its own where there is an error
            active.clear()
            active.update(before)

    return _forward


class _Sampler:
    """A noise sampler that gets the atoms of one molecule at a time."""

    def __init__(self, sampler, now):
        self._sampler, self._now = sampler, now

    def sample(self, array):
        places = self._now['places']
        if places is None or not places.are_rows(array):
            return self._sampler.sample(array)
        noise = cuda.get_array_module(array).zeros_like(array)
        for rows in places.of_graphs():
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
        places, rows = Places(adj), target.array.copy()
        if not places.are_rows(rows):
            return compute(self, *inputs)
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
            occluded = self._score_of(inputs, places.gather(masked, rows))
            scores[tuple(window)] += (score - occluded).reshape((-1,) + (1,) * (atoms.ndim - 1))
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
