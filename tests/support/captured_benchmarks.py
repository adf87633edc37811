"""Stand-ins that let the benchmarks of captured steps run without a GPU."""

from benchmarks.training import bench_captured
from benchmarks.training import step_contenders
from tests.training import host_graphs

WARM = 8  # one size and a few steps are enough


def stand_in(monkeypatch):
    """Let captured contenders run on the host, in turns of few steps."""
    host_graphs.stand_in(monkeypatch)
    monkeypatch.setattr(step_contenders, 'WARM_CAPTURED', WARM)
    monkeypatch.setattr(bench_captured, 'TURN', 0)
    monkeypatch.setattr(step_contenders, 'can_capture', lambda device: True)
    monkeypatch.setattr(step_contenders, 'DeviceDataset', lambda sparse, device: sparse)
