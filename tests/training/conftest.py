"""Fixtures of several files beside this one."""

import warnings

import numpy
import pytest

from tests.training import host_graphs


@pytest.fixture
def graphs(device, monkeypatch):
    """On the host: the stand-ins that were made, a list. On a GPU None."""
    return host_graphs.stand_in(monkeypatch) if device.xp is numpy else None


@pytest.fixture
def no_causes():
    """Fail where a step could not be captured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        yield
    assert not host_graphs.causes(caught)
