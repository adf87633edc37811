"""Stand-ins for CUDA graphs and pinned memory on the host: the updater's logic without a GPU.

A capture runs the function and undoes what it changed; a launch runs it again and writes into the
arrays that the capture returned, as a graph would. Values that the function read from Python stay
as they were only on a GPU.
"""

import contextlib
import types

import numpy

import chainer
from chainer_chemistry.models.prediction import Classifier
from chainer_chemistry.models.prediction import Regressor

from chainer_bspmm.cuda import gemm
from chainer_bspmm.cuda import step
from chainer_bspmm.training import graph_updater
from chainer_bspmm.training import staging
from chainer_bspmm.training import state
from chainer_bspmm.training import step_program


class HostCapturer:
    nbytes = 1

    def __init__(self, device, optimizer):
        self.stream = contextlib.nullcontext()
        self._optimizer = optimizer
        self.frozen = None
        self.n_captures = 0
        self.n_launches = 0

    def ordered(self):
        return contextlib.nullcontext()

    def join(self):
        pass

    def capture(self, function):
        links = [*self._optimizer.target.links(), *(self.frozen.links if self.frozen else ())]
        arrays = state.state_arrays(self._optimizer, links)
        before = state.copies(arrays)
        try:
            reported, gradients = result = function()
        finally:
            state.put_back(arrays, before)
        self.n_captures += 1
        written = [(vars(link), _variables(link)) for link in links]

        def launch():
            self.n_launches += 1
            with _python_as_it_was(links):
                again, new = function()
                for attributes, variables in written:
                    for name, variable in variables.items():
                        variable.array[...] = attributes[name].array
            for name, value in again.items():
                step_program._bare(reported[name])[...] = step_program._bare(value)
            for (_, _, old), (_, _, gradient) in zip(gradients, new):
                old[...] = gradient

        return launch, result


def _variables(link):
    """Return name -> variable, such as a loss: what a link keeps of a step."""
    return {name: value for name, value in vars(link).items() if type(value) is chainer.Variable}


@contextlib.contextmanager
def _python_as_it_was(links):
    """Undo what is done inside to attributes of links and to gradients: a graph does not do it."""
    attributes = [(vars(link), dict(vars(link))) for link in links]
    params = {id(param): param for link in links for param in link.params(include_uninit=False)}
    gradients = [(param, param.grad) for param in params.values()]
    yield
    for now, before in attributes:
        now.clear()
        now.update(before)
    for param, gradient in gradients:
        param.grad = gradient


class HostStaging(staging.Staging):
    def __init__(self, arrays, device):
        self.device = {name: numpy.zeros(*spec) for name, spec in arrays.items()}
        self._filled = {name: array.copy() for name, array in self.device.items()}

    def fill(self):
        for array in self._filled.values():
            array.view('u1').fill(255)  # the host must write all of it
        return self._filled

    def send(self):
        for name, array in self._filled.items():
            self.device[name][...] = array


def causes(caught):
    """Return the texts of recorded warnings that say why steps are not captured."""
    return [str(w.message) for w in caught if 'trains eagerly' in str(w.message)]


def stand_in(monkeypatch):
    """Make GraphUpdater take the host for a GPU. Fused updates are left out."""
    monkeypatch.setattr(graph_updater, 'why_not', lambda optimizer: 'this is the host')
    monkeypatch.setattr(
        gemm,
        'Blas',
        lambda: types.SimpleNamespace(use=lambda stream: None, dot=numpy.dot, matmul=numpy.matmul),
    )
    monkeypatch.setattr(gemm, 'step_for', lambda array: step.current())
    monkeypatch.setattr(graph_updater, 'cuda', types.SimpleNamespace(cupy=numpy))
    monkeypatch.setattr(staging, 'Staging', HostStaging)
    for kind in (Classifier, Regressor):  # on the host they report Python numbers
        monkeypatch.setattr(
            kind, '_convert_to_scalar', lambda self, value: step_program._bare(value)
        )
    made = []

    def capturer(device):
        made.append(HostCapturer(device, chainer.global_config.tested_optimizer))
        return made[-1]

    def context(capturer, *rest):
        made = step_program.Context(capturer, *rest)
        capturer.frozen = made.frozen
        return made

    monkeypatch.setattr(graph_updater, 'Capturer', capturer)
    monkeypatch.setattr(graph_updater, 'Context', context)
    return made
