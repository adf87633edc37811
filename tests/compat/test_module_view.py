from chainer_bspmm.compat import module_view  # repairs Chainer before anything imports it
import numpy
import pytest


def test_view_adds_names_to_itself_alone():
    assert module_view.ModuleView(numpy, float=float).float is float
    assert 'float' not in vars(numpy)


def test_view_passes_on_the_rest():
    view = module_view.ModuleView(numpy, float=float)
    assert view.float32 is numpy.float32
    with pytest.raises(AttributeError, match="module 'numpy' has no attribute 'no_such_name'"):
        getattr(view, 'no_such_name')  # noqa: B009


def test_in1d_is_one_dimensional():
    values = numpy.array([[1, 2], [3, -1]])
    for invert in (False, True):
        got = module_view._in1d(values, [1, -1], invert=invert)
        numpy.testing.assert_array_equal(got, numpy.array([True, False, False, True]) ^ invert)
