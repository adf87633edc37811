"""Fixtures that several files in this folder use."""

import warnings

import numpy
import pytest

from tests.training import host_graphs


@pytest.fixture
def graphs(device, monkeypatch):
    """The list of stand-ins that were made on the host; None on a GPU."""
    return host_graphs.stand_in(monkeypatch) if device.xp is numpy else None


@pytest.fixture
def no_causes():
    """Fail where a step could not be captured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        yield
    assert not host_graphs.causes(caught)
