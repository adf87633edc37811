"""Reading what Nsight Compute prints."""

import pytest

from benchmarks.products import ncu

PRINTED = """\
==PROF== Connected to process 7
a line of the program
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","gpu__time_duration.sum","sm__cycles_active.avg.pct"
"","","","ns","%"
"0","7","bspmm_csr","5,312.00","88.25"
"1","7","bspmm(int, int)","1216","7.5"
"""


def test_parse():
    metrics = 'gpu__time_duration.sum', 'sm__cycles_active.avg.pct'
    assert ncu.parse(PRINTED, metrics) == [
        {'kernel': 'bspmm_csr', metrics[0]: 5312.0, metrics[1]: 88.25},
        {'kernel': 'bspmm(int, int)', metrics[0]: 1216.0, metrics[1]: 7.5},
    ]


def test_parse_without_kernels():
    assert ncu.parse('==PROF== Connected\n==WARNING== No kernels were profiled.\n', ['a']) == []


def test_run_says_what_went_wrong(monkeypatch, tmp_path):
    fake = tmp_path / 'ncu'
    fake.write_text('#!/bin/sh\necho no counters here >&2\nexit 3\n')
    fake.chmod(0o755)
    monkeypatch.setattr(ncu.shutil, 'which', lambda name: str(fake))
    with pytest.raises(RuntimeError, match='exit status 3\n(.|\n)*no counters here'):
        ncu.run(['a'], ['true'])
