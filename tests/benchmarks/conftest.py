"""Fixture that all tests of benchmarks use."""

import pytest

import chainer_bspmm  # NOQA: F401  (repairs Chainer before anything imports it)
import chainer


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Leave out the check of the first step, which takes longer on a host than short trainings."""
    monkeypatch.setitem(vars(chainer.global_config), 'bspmm_check_swap', False)
