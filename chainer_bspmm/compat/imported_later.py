"""Delayed imports of packages that upstream uses in few functions only.

They would take two thirds of the time of ``import chainer_chemistry``.
"""

import builtins
import contextlib
import importlib
import importlib.util
import sys
import types

from chainer_bspmm.compat.import_hooks import surrounds

# Upstream module -> modules that it needs only inside of functions.
IMPORTED_LATER = {
    'chainer.datasets.svhn': {'scipy.io'},
    'chainer.distributions.multivariate_normal': {'scipy.linalg'},
    'chainer.functions.math.erfcinv': {'scipy.special'},
    'chainer.functions.math.erfcx': {'scipy.special'},
    'chainer.functions.math.erfinv': {'scipy.special'},
    'chainer.functions.math.ndtri': {'scipy.special'},
    'chainer_chemistry.dataset.parsers.csv_file_parser': {'pandas'},
    'chainer_chemistry.dataset.parsers.smiles_parser': {'pandas'},
    'chainer_chemistry.dataset.preprocessors.megnet_preprocessor': {
        'rdkit.Chem.AllChem',
        'rdkit.Chem.ChemicalFeatures',
        'rdkit.Chem.Descriptors',
    },
    'chainer_chemistry.dataset.preprocessors.schnet_preprocessor': {'rdkit.Chem.AllChem'},
    'chainer_chemistry.dataset.preprocessors.weavenet_preprocessor': {
        'rdkit.Chem.AllChem',
        'rdkit.Chem.ChemicalFeatures',
    },
    'chainer_chemistry.dataset.splitters.deepchem_scaffold_splitter': {
        'rdkit.Chem.Scaffolds.MurckoScaffold'
    },
    'chainer_chemistry.dataset.splitters.scaffold_splitter': {
        'rdkit.Chem.Scaffolds.MurckoScaffold'
    },
    'chainer_chemistry.dataset.splitters.stratified_splitter': {'pandas'},
    'chainer_chemistry.datasets.molnet.molnet': {'joblib', 'pandas'},
    'chainer_chemistry.datasets.molnet.pdbbind_time': {'pandas'},
    'chainer_chemistry.datasets.qm9': {'pandas'},
    'chainer_chemistry.datasets.zinc': {'pandas'},
    'chainer_chemistry.training.extensions.prc_auc_evaluator': {'sklearn.metrics'},
    'chainer_chemistry.training.extensions.roc_auc_evaluator': {'sklearn.metrics'},
}


class _Later(types.ModuleType):
    """Stand-in for a module in one upstream module; imports it when a name is read from it."""

    def __getattr__(self, name):
        return getattr(importlib.import_module(self.__name__), name)


def _stands_for(name, later):
    """Return whether a module is to be imported later: neither imported yet nor missing."""
    return (
        name in later
        and name not in sys.modules
        and importlib.util.find_spec(name.partition('.')[0]) is not None
    )


@surrounds(*IMPORTED_LATER)
@contextlib.contextmanager
def import_later():
    """Let the modules of the table import pandas, scikit-learn and others at their first use."""
    # Only import statements in the modules of the table get stand-ins; modules that they import in
    # turn are not affected.
    import_now = builtins.__import__

    def import_(name, globals=None, locals=None, fromlist=(), level=0):
        later = IMPORTED_LATER.get((globals or {}).get('__name__'), ())
        if not fromlist and _stands_for(name, later):
            package, _, submodule = name.partition('.')
            if not submodule:
                return _Later(name)
            return types.SimpleNamespace(**{submodule: _Later(name)})
        full_names = {item: '%s.%s' % (name, item) for item in fromlist or ()}
        stand_ins = {
            item: _Later(full) for item, full in full_names.items() if _stands_for(full, later)
        }
        if not stand_ins:
            return import_now(name, globals, locals, fromlist, level)
        others = [item for item in fromlist if item not in stand_ins]
        if others:
            module = import_now(name, globals, locals, others, level)
            stand_ins.update((item, getattr(module, item)) for item in others)
        return types.SimpleNamespace(**stand_ins)

    builtins.__import__ = import_
    try:
        yield
    finally:
        builtins.__import__ = import_now
