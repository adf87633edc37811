"""Stand-ins for names that upstream modules need only while they are imported."""

import collections
import collections.abc
import contextlib
import importlib.metadata
import sys
import types
import warnings

import numpy

from chainer_bspmm.compat.import_hooks import repairs, surrounds
from chainer_bspmm.compat.module_view import ModuleView, lost_numpy_names


@contextlib.contextmanager
def _in_place(table, entries):
    """Put entries into a dict of modules, or of a module's names, and restore it at the end."""
    before = {name: table[name] for name in entries if name in table}
    table.update(entries)
    try:
        yield
    finally:
        for name in entries:
            table.pop(name, None)
        table.update(before)


# Exceptions of pkg_resources.
_ResolutionError = type('ResolutionError', (Exception,), {})
_DistributionNotFound = type('DistributionNotFound', (_ResolutionError,), {})
_VersionConflict = type('VersionConflict', (_ResolutionError,), {})


def _require_nothing(requirement):
    # This tells chainer._environment_check that no optional package is installed. Otherwise it
    # would demand CuPy below 8, which does not run on today's Python.
    raise _DistributionNotFound(requirement)


class _WorkingSet:
    """Stand-in for pkg_resources.WorkingSet, as chainer.testing.with_requires uses it."""

    def require(self, *texts):
        from packaging.requirements import Requirement

        for requirement in map(Requirement, texts):
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError as error:
                raise _DistributionNotFound(str(requirement)) from error
            if not requirement.specifier.contains(version, prereleases=True):
                raise _VersionConflict(f'{requirement}, but {version} is installed')


@surrounds('chainer._environment_check', 'chainer.testing.helper', 'chainer.testing.doctest_helper')
def pkg_resources_stand_in():
    """chainer/_environment_check.py and chainer/testing import pkg_resources."""
    # setuptools >= 82 lacks it, and earlier versions warn when it is imported; so the real one is
    # hidden, too.
    module = types.ModuleType('pkg_resources')
    vars(module).update(
        ResolutionError=_ResolutionError,
        DistributionNotFound=_DistributionNotFound,
        VersionConflict=_VersionConflict,
        WorkingSet=_WorkingSet,
        require=_require_nothing,
    )
    return _in_place(sys.modules, {'pkg_resources': module})


@surrounds('chainer._environment_check')
def numpy_distutils_stand_in():
    """chainer/_environment_check.py imports numpy.distutils.system_info."""
    # Python 3.12 lacks it, and NumPy >= 1.23 warns when it is imported.
    names = 'numpy.distutils', 'numpy.distutils.system_info'
    return _in_place(sys.modules, {name: types.ModuleType(name) for name in names})


@repairs('chainer._environment_check')
def skip_accelerate_check(module):
    """chainer/_environment_check.py asks numpy.distutils, on macOS, for NumPy's BLAS."""
    system_info = types.SimpleNamespace(get_info=lambda name: {})
    module.numpy = ModuleView(numpy, distutils=types.SimpleNamespace(system_info=system_info))


@surrounds('chainer.functions.array.as_strided')
def sctypes_stand_in():
    """chainer/functions/array/as_strided.py reads numpy.sctypes at import; NumPy 2 has none."""
    return _in_place(vars(numpy), lost_numpy_names('sctypes'))


@surrounds('chainer_chemistry.utils.extend')
def iterable_stand_in():
    """chainer_chemistry/utils/extend.py imports Iterable from collections; Python 3.10 has none."""
    return _in_place(vars(collections), {'Iterable': collections.abc.Iterable})


@surrounds('chainer.training.updaters.multiprocess_parallel_updater')
@contextlib.contextmanager
def nccl_may_be_missing():
    """chainer/training/updaters/multiprocess_parallel_updater.py tests whether CuPy has NCCL."""
    # CuPy 13 and later warn if there is no NCCL. The updater itself raises an error when it is
    # made.
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', r'\s*nccl library could not be loaded')
        yield
