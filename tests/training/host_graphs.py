"""Stand-ins for CUDA graphs and pinned memory on the host, to test the updater without a GPU.

A capture runs the function and undoes its changes; a launch runs it again and writes into the
arrays that the capture returned, as a graph would. Values that the function reads through
:func:`read_at_capture` are the same in every launch, like values that a graph has recorded.
"""

import collections
import contextlib
import re
import sys
import types
import warnings
import weakref

import numpy

import chainer
from chainer_chemistry.models.prediction import Classifier, Regressor

from chainer_bspmm.cuda import gemm, step
from chainer_bspmm.ops import elementwise
from chainer_bspmm.multi_node import communicators
from chainer_bspmm.training import driver, flat_gradients, guards, prediction, program, reports
from chainer_bspmm.training import session, staging, update
from chainer_bspmm.training.cuda_graphs import HostCopyError
from chainer_bspmm.training.fused_update import FusedUpdate, why_unsupported
from chainer_bspmm.training.peer_memory import PeerMemory, PeerSums
from chainer_bspmm.training.session import Session
from chainer_bspmm.training.snapshot import Snapshot
from chainer_bspmm.training.training_driver import TrainingDriver

_tape = types.SimpleNamespace(recorded=None, replayed=None)


def read_at_capture(read):
    """Return a function that returns ``read()``, but in a launch the value from the capture."""

    def value():
        if _tape.replayed is not None:
            return next(_tape.replayed)
        found = read()
        if _tape.recorded is not None:
            _tape.recorded.append(found)
        return found

    return value


@contextlib.contextmanager
def _recorded():
    _tape.recorded = values = []
    try:
        yield values
    finally:
        _tape.recorded = None


@contextlib.contextmanager
def _replayed(values):
    _tape.replayed = iter(values)
    try:
        yield
    finally:
        _tape.replayed = None


def _capture_and_drop(graphs, function):
    n_captures = graphs.n_captures
    with contextlib.suppress(Exception):
        graphs.capture(function)
    graphs.n_captures = n_captures
    graphs.n_compiled += 1


class _Counting:
    """Base of the capturers on the host. It has no streams, and counts captures and launches.

    `is_ordered`: whether work that starts now would be ordered after and before all other work.
    """

    compile_kernels = _capture_and_drop

    def __init__(self):
        self.stream = contextlib.nullcontext()
        self.n_captures = self.n_launches = self.n_compiled = 0
        self.is_ordered = False

    @contextlib.contextmanager
    def ordered(self):
        before, self.is_ordered = self.is_ordered, True
        try:
            yield
        finally:
            self.is_ordered = before

    def join(self):
        pass


# Snapshots that stand-ins for graphs need for their launches. A CUDA graph needs none.
_snapshots: weakref.WeakSet = weakref.WeakSet()


class _References(guards.References):
    """References of guards, and of the snapshots that stand in for graphs."""

    def are_at_least(self, n, value):
        found: list = []
        for each in _snapshots:
            for _, saved in each._python.places:
                found += saved.values() if isinstance(saved, dict) else saved
            found += [gradient for _, gradient in each._gradients]
            found += each.arrays.values()
        return super().are_at_least(n - sum(each is value for each in found), value)


class HostCapturer(_Counting):
    """Capturer whose graphs run the function again, in the state that Python had at the capture.

    `session` is the session that the capturer was made for.
    """

    nbytes = 1
    session: Session

    def capture(self, function):
        reach = self.session.guards.reach
        before = Snapshot(self.session.target, reach)
        with self.ordered(), _recorded() as values:
            try:
                result = function()
            finally:
                before.restore_arrays()
        self.n_captures += 1
        effects = _arrays(before.changes())
        _snapshots.add(before)
        guards.references.n_changes += 1

        def launch():
            self.n_launches += 1
            now = Snapshot(self.session.target, reach)
            before.restore_python(with_numbers=False)
            try:
                with self.ordered(), _replayed(values):
                    again = function()
                new = _arrays(before.changes())
            finally:
                now.restore_python()
            # Without a reporter, as in a benchmark, nothing is reported this time.
            names = [] if again is None else [name for name in result if name in again]
            for name in names:
                array = chainer.as_array(result[name])
                if isinstance(array, numpy.ndarray):  # a number stays that of the capture
                    array[...] = chainer.as_array(again[name])
            for old, array in zip(effects, new, strict=True):
                old[...] = array

        return launch, result


def _arrays(values):
    """Return the arrays (list) in variables, dicts, lists, tuples and deques, in order."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, chainer.Variable):
        values = values.array, values.grad
    if isinstance(values, (list, tuple, collections.deque)):
        return [array for value in values for array in _arrays(value)]
    return [values] if isinstance(values, numpy.ndarray) else []


class HostStaging(staging.Staging):
    """Staging on the host. Like the kernel, its copy takes the slots in turn."""

    is_kernel = True

    def __init__(self, arrays, device):
        self.device = {name: numpy.zeros(*spec) for name, spec in arrays.items()}
        self._slots = [
            {name: array.copy() for name, array in self.device.items()}
            for _ in range(2 * staging.N_SLOTS)
        ]
        self._next = self._position = 0
        self._is_filled = False

    def fill(self):
        if self._is_filled:  # after an error
            self._next = self._position
        for array in self._slots[self._next].values():
            array.view('u1').fill(255)  # so that a value that the host forgets to write is noticed
        self._is_filled = True
        return self._slots[self._next]

    def copy(self):
        if _tape.recorded is not None:
            return
        for name, array in self._slots[self._position].items():
            self.device[name][...] = array
        self._position = (self._position + 1) % len(self._slots)

    def copied(self, stream):
        self._next = (self._next + 1) % len(self._slots)
        self._is_filled = False
        assert self._next == self._position


class HostReports(reports.Reports):
    """`Reports` that copy numbers, not addresses; a capture writes nothing."""

    def _load(self):
        pass

    def write(self, numbers, row_address):
        if _tape.recorded is not None:
            self._kinds = [(name, array.dtype) for name, array in numbers.items()]
            return
        for i, array in enumerate(numbers.values()):
            place = self._rows[int(row_address[0]), i : i + 1].view(array.dtype)
            place[0] = array

    def next_row(self):
        if not self._kinds:
            return 0
        if self._row == reports.N_ROWS:
            self._rows = numpy.full((reports.N_ROWS, len(self._kinds)), 2**64 - 1, numpy.uint64)
            self._row = 0
        self._row += 1
        return self._row - 1

    def numbers(self):
        numbers = {}
        for i, (name, dtype) in enumerate(self._kinds):
            stored = self._rows[self._row - 1, i : i + 1]
            numbers[name] = stored.view(dtype)[:1].reshape(())  # the first bytes, if it is smaller
        return numbers


@contextlib.contextmanager
def eager_causes():
    """Yield a list that gets, at the end, the warnings that say why something is not captured."""
    actual = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        yield actual
    texts = [str(w.message) for w in caught]
    pattern = '(trains|predicts|runs|evaluates) eagerly'
    actual += [text for text in texts if re.search(pattern, text)]


class HostFused(FusedUpdate):
    """`FusedUpdate` of SGD whose launch runs in NumPy; only the launch is replaced."""

    def prepare(self):
        self.variants()

    def load_kernels(self):
        pass

    def launch(self, numbers):
        self.optimizer.reallocate_cleared_grads()
        self.optimizer.call_hooks('pre')
        of_params = numbers[2 * len(self._hooks) :]
        for param, rate in zip(self._params, of_params, strict=True):
            if param.array is not None:
                param.array[...] -= rate.astype(param.dtype) * param.grad


def _why_not_fused(optimizer):
    if type(optimizer) is not chainer.optimizers.SGD:
        return 'this is the host, and the optimizer is not SGD'
    return why_unsupported(optimizer)


def fuse(monkeypatch):
    """Make stand-ins launch updates of SGD with the step."""
    monkeypatch.setattr(update, 'why_unsupported', _why_not_fused)
    monkeypatch.setattr(update, 'FusedUpdate', HostFused)


def _as_cupy_joins(join):
    """Refuse more than eight arrays in a step: CuPy would send a table of them from the host."""

    def joined(arrays, *args, **kwargs):
        is_ours = sys._getframe(1).f_code.co_filename == elementwise.__file__
        if step.current() is not None and not is_ours and len(arrays) > 8:
            raise HostCopyError('a table of %d arrays' % len(arrays))
        return join(arrays, *args, **kwargs)

    return joined


def dot(a, b, to=None):
    """Multiply like `gemm.Blas.dot`, which adds to its third argument; ``numpy.dot`` overwrites."""
    product = a.dot(b)
    if to is None:
        return product
    to += product
    return to


def _stand_in_everywhere(monkeypatch):
    make = Session.__init__

    def made(self, *args):
        make(self, *args)
        self.capturer.session = weakref.proxy(self)

    monkeypatch.setattr(Session, '__init__', made)
    monkeypatch.setattr(guards, 'references', _References())
    blas = types.SimpleNamespace(use=lambda stream: None, dot=dot, matmul=numpy.matmul)
    monkeypatch.setattr(gemm, 'Blas', lambda: blas)
    monkeypatch.setattr(gemm, 'step_for', lambda array: step.current())
    monkeypatch.setattr(staging, 'Staging', HostStaging)
    monkeypatch.setattr(program, 'Reports', HostReports)
    for name in ('concatenate', 'stack'):
        monkeypatch.setattr(numpy, name, _as_cupy_joins(getattr(numpy, name)))
    for kind in (Classifier, Regressor):  # on the host they report Python numbers
        monkeypatch.setattr(kind, '_convert_to_scalar', lambda self, value: chainer.as_array(value))


def stand_in(monkeypatch):
    """Make GraphUpdater take the host for a GPU; return the capturers that it makes.

    Fused updates are left out (see :func:`fuse`). Evaluators are captured, too.
    """
    stand_in_for_prediction(monkeypatch)
    monkeypatch.setattr(update, 'why_unsupported', lambda optimizer: 'this is the host')
    made = []
    begin = TrainingDriver._begin

    def begun(self, function):
        """Begin a session whose capturer is in the list `made`."""
        others = session.Capturer

        def capturer(device):
            made.append(HostCapturer())
            return made[-1]

        session.Capturer = capturer
        try:
            return begin(self, function)
        finally:
            session.Capturer = others

    monkeypatch.setattr(TrainingDriver, '_begin', begun)
    return made


class PredictionGraphs(HostCapturer):
    """Capturer of predictions that counts the results on their way to the host."""

    def __init__(self):
        super().__init__()
        self.n_waiting = self.most_waiting = self.n_freed = 0
        self.fail = None

    def free_unused(self):
        self.n_freed += 1

    def capture(self, function):
        if self.fail:
            raise self.fail
        return super().capture(function)

    def outgoing(self, array):
        values = array.copy()
        is_waiting = True
        self.n_waiting += 1
        self.most_waiting = max(self.most_waiting, self.n_waiting)

        def wait():
            nonlocal is_waiting
            self.n_waiting -= is_waiting
            is_waiting = False
            return values

        return types.SimpleNamespace(wait=wait)


def stand_in_for_prediction(monkeypatch):
    """Make captured_predict take the host for a GPU; return the stand-in for its graphs."""
    _stand_in_everywhere(monkeypatch)
    graphs = PredictionGraphs()
    monkeypatch.setattr(driver, 'cuda', types.SimpleNamespace(cupy=numpy))
    monkeypatch.setattr(session, 'Capturer', lambda device: graphs)
    monkeypatch.setattr(prediction, '_Outgoing', graphs.outgoing)
    return graphs


class HostPeerSums(PeerSums):
    """`PeerSums` by MPI. A capture does not call MPI, because a capture on a GPU runs nothing."""

    def __init__(self, comm):
        super().__init__(comm)
        self._sent = {}  # number of a sum -> the arrays of all ranks in the last step

    def sum(self, array):
        number = self._next
        super().sum(array)
        if not (self._alone or _tape.recorded is not None):
            self._sent[number] = self._comm.mpi_comm.allgather(array)
        arrays = self._sent.get(number, [numpy.zeros_like(array)] * self._comm.size)
        return sum(array if r == self._comm.rank else of for r, of in enumerate(arrays))


class HostPeers:
    """`PeerMemory` without memory, because sums are collectives here."""

    vectors = ()

    def __init__(self, sizes):
        self._sizes = sizes

    fits = PeerMemory.fits


class HostFlatGradients(flat_gradients.FlatGradients):
    """`FlatGradients` in NumPy; only ranks of one host can capture the sum."""

    def __init__(self, optimizer, peers=None):
        super().__init__(optimizer, peers)
        self.sums = HostPeerSums(self._comm)

    def connect(self):
        self.peers = HostPeers(self._room()) if self._comm.is_one_host else None

    def load_kernels(self):
        pass

    def pack(self, n_molecules, loss, alone=False):
        self.sent[self._n :] = 0
        self.sent[self._n] = n_molecules
        self.sent[self._n + 1 + self._comm.rank] = not numpy.isfinite(loss)
        for param, part in self._parts(self.sent):
            part[...] = n_molecules * param.grad

    def add_up(self):
        if not self.has_sum:
            assert _tape.recorded is None and _tape.replayed is None
            self._add_up()

    def _add_up(self):
        self._sum[...] = self.sent
        self._comm.nccl_comm.allReduce(self.sent, self._sum)

    def unpack(self):
        if self.has_sum and _tape.recorded is None:
            self._add_up()
        total = self._sum[self._n]
        flags = self._sum[self._n + 1 :]
        given = read_at_capture(lambda: [param.grad for param in self._params()])()
        for (param, part), gradient in zip(self._parts(self._sum), given):
            param.grad = gradient
            param.grad[...] = 0 if flags.any() else part / total
        if _tape.recorded is None:
            self._is_bad[flags != 0] = 1

    def _parts(self, array):
        """Yield every parameter with its part of the array, in the parameter's shape."""
        start = 0
        for param in self._params():
            yield param, array[start : start + param.size].reshape(param.shape)
            start += param.size


def with_ranks(monkeypatch, comm):
    """Make `GraphUpdater` take `comm`, which may be any object, for an NCCL communicator.

    Updates are fused. ``comm.n_waits`` counts how often the host waits for launched work.
    """
    fuse(monkeypatch)
    place = types.SimpleNamespace(empty=numpy.empty)
    comm.n_waits = 0

    def wait():
        comm.n_waits += 1

    stream = types.SimpleNamespace(synchronize=wait)
    place.cuda = types.SimpleNamespace(
        alloc_pinned_memory=bytearray, get_current_stream=lambda: stream
    )
    monkeypatch.setattr(flat_gradients, 'cuda', types.SimpleNamespace(cupy=place))
    monkeypatch.setattr(update, 'FlatGradients', HostFlatGradients)
    monkeypatch.setattr(communicators, 'is_nccl', lambda given: given is comm)
