"""Faults planted in kernels, which the kernels' representatives must notice."""

import multiprocessing
import shutil
import signal
import sys

import pytest

from chainer_bspmm.cuda import kernels
from tests.emulation.emulator.cache import CompileError
from tests.emulation.emulator.cuda_on_cpu import knows, MEMORY, RACES
from tests.emulation.mutants import mutants, paths
from tests.emulation.registry import KERNELS
from tests.support.devices import slow_unless

NOTICED, UNKNOWN = 3, 4  # exit status
SECONDS = 1  # processor time after which a kernel counts as hung; it needs a twentieth
# Faults that no representative can notice: (file, part of the line, reason)
UNNOTICED = [
    ('bspmm_csr.cu', 'if (row + step < stop) {', 'bounds of one row more are read, which exist'),
    ('bspmm_csr.cu', 'if (left > 0) load(', 'the last entry before is read, and not used'),
    ('bspmm_csr.cu', 'c == 0) begun[number / 2]', 'the other threads would write the same'),
    ('bspmm_csr.cu', 'c >= n_vectors) return;', 'blocks are as wide as the rows'),
    ('bspmm_csr.cu', 'const unsigned tile =', 'one block is as wide as the rows'),
    ('degree_rows.cu', 'const long long n_threads =', 'fewer spare entries than threads'),
    ('edge_film.cu', 'c += gridDim.y * blockDim.x) {', 'one block is as wide as the rows'),
    ('embed_grad.cu', 'for (int base = 0;', 'a round without rows adds nothing'),
    ('embed_grad.cu', 'Real value[ROWS / WARPS];', 'more room'),
    ('flat_gradients.cu', 'threadIdx.x == 0) {', 'the other threads would write the same'),
    ('fused_update.cu', 'const Real sign =', 'no parameter is NaN'),
    ('fused_update.cu', 'if (!(scale > 1))', 'times one'),
    ('gated_step.cu', 'Piece gate =', 'no such operator'),
    ('gated_step.cu', 'if constexpr (QUADS > 0)', 'a loop without a round'),
    ('gated_step.cu', 'chunk < STAGES - 1;', 'one chunk more is loaded, and then again'),
    ('gated_weights.cu', 'to[j * TILE + e] = 0;', 'a vector of one element'),
    ('gather_batch.cu', 'if (lane == 0) {', 'the other lanes write the same'),
    ('gather_batch.cu', 'i < bytes; i += step) to[i] = 0;', 'what lies there is zero'),
    ('gather_batch.cu', 'before.entries += sizes[u]', 'few molecules come before'),
    ('layer_norm.cu', 'mean) * inv_std) +', 'the mean is zero'),
    ('mean_loss.cu', 'if (lane == 0) of_warp', 'the other lanes write the same'),
    ('relation_rows.cu', 'relation < n_relations;', 'a relation without entries'),
    ('relation_rows.cu', 'if (thread == 0)', 'the other threads write the same'),
    ('relation_rows.cu', 'const long long n_threads =', 'fewer spare entries than threads'),
    ('segment_broadcast.cu', 'if (!has_long) continue;', 'chunks are of long segments'),
    (
        'segment_reduce.cu',
        'const bool inside = c < n_vectors &&',
        'an empty segment is zero anyway',
    ),
    ('segment_softmax.cu', 'c += gridDim.y * blockDim.x) {', 'one block is as wide as the rows'),
    ('transpose_csr.cu', 'for (int step = 1;', 'no lane is so far'),
    ('transpose_csr.cu', 'order[i] = i;', 'no spare entries'),
    ('transpose_csr.cu', 'const unsigned graph =', 'one graph'),
    ('peers.cuh', 'const PeerWord word =', 'elements of one word'),
]


def is_known(mutant):
    return any(file == mutant.file and part in mutant.line for file, part, _ in UNNOTICED)


def uses_of(file):
    """Yield the representatives of a kernel, or of all kernels that include a header."""
    for name, path in kernels.paths().items():
        if file == path.name or '#include "%s"' % file in path.read_text():
            yield from KERNELS[name].uses


def look(make_device, file):
    """Exit with status NOTICED, or by a signal from the kernel, if the fault is noticed."""
    for sanitizer, times in (None, 1), (MEMORY, 1), (RACES, 20):
        if sanitizer and not knows(sanitizer=sanitizer):
            sys.exit(UNKNOWN)
        for use in dict.fromkeys(uses_of(file)):
            for _ in range(times):  # a race is noticed only if two threads are close in time
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                try:
                    use(make_device(sanitizer))
                except CompileError:
                    raise  # says nothing about the tests
                except Exception:
                    sys.exit(NOTICED)  # wrong result or KernelError


QUICK = 'bspmm_csr.cu', 'dropout.cu', 'layer_norm.cu', 'segment_reduce.cu'  # one fault of each


@pytest.mark.parametrize(
    'mutant',
    [
        slow_unless(i == 0 and path.name in QUICK, mutant, id='%s: %s | %s' % mutant[:3])
        for path in paths()
        for i, mutant in enumerate(m for m in mutants(path) if not is_known(m))
    ],
)
def test_noticed(make_device, monkeypatch, tmp_path, mutant):
    folder = tmp_path / 'kernels'
    shutil.copytree(kernels.directory(), folder)
    (path,) = folder.rglob(mutant.file)
    path.write_text(mutant.text)
    monkeypatch.setattr(kernels, 'directory', lambda: folder)
    # A fault may corrupt the process in which it runs.
    fork = multiprocessing.get_context('fork')
    process = fork.Process(target=look, args=(make_device, mutant.file))
    process.start()
    process.join()
    if process.exitcode == UNKNOWN:
        pytest.skip('not without a sanitizer, which does not work here')
    assert process.exitcode == NOTICED or process.exitcode < 0, mutant.line


def test_faults_that_nothing_notices_exist():
    of_file = {path.name: mutants(path) for path in paths()}
    for file, part, why in UNNOTICED:
        assert sum(part in mutant.line for mutant in of_file[file]) == 1, (file, part, why)
