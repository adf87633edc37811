"""Imports of upstream in new processes: order, leftovers, warnings, missing packages."""

import re
import sys
import textwrap
import types

import pytest

from tests.support.processes import Forks, python

# All programs begin with this, and may then hide modules: HIDE.add('pkg_resources').
_HIDE = """
import sys
class Hide(set):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in self or name in self:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
HIDE = Hide()
sys.meta_path.insert(0, HIDE)
"""


# Other packages that upstream imports, and that import neither pkg_resources nor setuptools nor
# distutils. The programs import upstream itself.
OTHERS = [
    'joblib',
    'numpy.testing',
    'pandas',
    'rdkit.Chem.AllChem',
    'scipy.sparse',
    'sklearn.metrics',
    'tqdm',
]


@pytest.fixture(scope='module')
def forks(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp('forks'), *OTHERS)
    yield forks
    forks.close()


@pytest.fixture
def run(forks):
    """Function that runs code in a process without Chainer; returns standard output and error."""

    def run_code(code):
        done = forks.run(_HIDE + textwrap.dedent(code))
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run_code


def run_alone(code, *options):
    """Run code in a new interpreter; return standard output and error."""
    done = python(*options, '-c', _HIDE + textwrap.dedent(code))
    return done.stdout, done.stderr


@pytest.mark.slow  # compiles all of upstream
def test_clean_import_warns_of_nothing():
    # -B and an empty cache prefix make Python compile sources again, which is when it warns about
    # escape sequences.
    _, errors = run_alone(
        """
        import sys, tempfile
        sys.pycache_prefix = tempfile.mkdtemp()
        import chainer_bspmm
    """,
        '-B',
        '-W',
        'default',
    )
    assert 'Warning' not in errors


def test_import_leaves_no_names_in_numpy_or_collections():
    printed, _ = run_alone("""
        import collections, numpy, sys
        numpy_names = set(vars(numpy))
        import chainer_bspmm
        new = {name for name in set(vars(numpy)) - numpy_names
               if type(getattr(numpy, name)).__name__ != 'module'}
        print(sorted(new), hasattr(collections, 'Iterable'))
        import chainer
        print(chainer.__version__, 'chainer_chemistry' in sys.modules)
    """)
    assert printed.splitlines() == ['[] False', '7.8.1 True']


def test_heavy_packages_are_imported_when_they_are_used():
    printed, _ = run_alone("""
        import builtins, sys
        import_ = builtins.__import__
        import chainer_bspmm, chainer, numpy
        print(builtins.__import__ is import_)
        heavy = ('joblib', 'matplotlib', 'pandas', 'scipy.io', 'scipy.linalg', 'scipy.special',
                 'scipy.stats', 'sklearn', 'rdkit.Chem.AllChem', 'rdkit.Chem.Descriptors')
        print([name for name in heavy if name in sys.modules])
        from chainer_chemistry.training.extensions import prc_auc_evaluator, roc_auc_evaluator
        print(roc_auc_evaluator.metrics.roc_auc_score([0, 1], [0, 1]),
              prc_auc_evaluator.metrics.auc([0, 1], [1, 1]))
        print(chainer.functions.erfinv(numpy.zeros(1, 'f')).array.tolist())
        zero, one = numpy.zeros(2, 'f'), numpy.eye(2, dtype='f')
        normal = chainer.distributions.MultivariateNormal(zero, scale_tril=one)
        print(normal.log_prob(zero).array.round(3))
        from chainer_chemistry.dataset.parsers import csv_file_parser
        import pandas
        print(csv_file_parser.pandas.DataFrame is pandas.DataFrame)
        from chainer_chemistry.dataset.preprocessors import megnet_preprocessor
        from rdkit.Chem import AllChem
        print(megnet_preprocessor.AllChem.AddHs is AllChem.AddHs, megnet_preprocessor.Chem.__name__)
    """)
    assert printed.splitlines() == [
        'True',
        '[]',
        '1.0 1.0',
        '[0.0]',
        '-1.838',
        'True',
        'True rdkit.Chem',
    ]


def test_nccl_that_nobody_asked_for_is_not_missed(tmp_path):
    package = tmp_path / 'cupy' / 'cuda'
    package.mkdir(parents=True)
    (tmp_path / 'cupy' / '__init__.py').touch()
    (package / '__init__.py').touch()
    (package / 'nccl.py').write_text(
        'import warnings\n'
        r"""
print('asked for')
warnings.warn('\nnccl library could not be loaded.\n')  # as CuPy does
"""
    )
    printed, errors = run_alone(
        f"""
        import sys, warnings
        sys.path.insert(0, {str(tmp_path)!r})
        import chainer_bspmm
        warnings.warn('nccl library could not be loaded later')
    """,
        '-W',
        'default',
    )
    assert printed == 'asked for\n'
    assert 'loaded later' in errors and 'loaded.' not in errors


def test_import_where_setuptools_and_numpy_distutils_are_missing(run):
    run("""
    # Old versions of these need distutils themselves, and came when Python had it.
    import joblib, numpy.testing, pandas, scipy.sparse, sklearn.metrics
    for name in list(sys.modules):
        if name.split('.')[0] in ('pkg_resources', 'setuptools', 'distutils'):
            del sys.modules[name]
    HIDE.update(['pkg_resources', 'setuptools', 'distutils', '_distutils_hack',
                 'numpy.distutils.system_info'])
    import chainer_bspmm
    from chainer_chemistry.utils.sparse_utils import sparse_utils_available
    assert sparse_utils_available()
    assert 'pkg_resources' not in sys.modules
    from chainer import testing
    assert testing.FunctionTestCase
    """)


def test_real_pkg_resources_is_hidden_from_chainer_alone(run):
    printed, errors = run("""
        import sys, types
        real = sys.modules['pkg_resources'] = types.ModuleType('pkg_resources')
        import chainer_bspmm
        import chainer
        print(sys.modules['pkg_resources'] is real)
        print(chainer._environment_check.pkg_resources is real)
    """)
    assert printed.split() == ['True', 'False']


def test_chainer_testing_finds_its_requirements(run):
    pytest.importorskip('packaging')
    run("""
        import chainer_bspmm
        from chainer import testing
        import unittest
        def skipped(decorator):
            return getattr(decorator(lambda: None), '__unittest_skip__', False)
        assert not skipped(testing.with_requires('numpy>=1.10'))
        assert skipped(testing.with_requires('numpy>=99'))
        assert skipped(testing.with_requires('no-such-package'))
        assert skipped(testing.without_requires('numpy>=1.10'))
    """)


def test_import_after_a_failed_import_of_chainer(run):
    # A module of Chainer's is hidden, so that the import fails even if Chainer needs no repair.
    printed, _ = run("""
    HIDE.add('chainer._environment_check')
    try:
        import chainer
    except (ImportError, AttributeError):
        pass
    HIDE.clear()
    stale = {name: sys.modules[name] for name in sys.modules if name.startswith('chainer.')}
    assert stale and 'chainer' not in sys.modules
    import chainer_bspmm
    import chainer
    import numpy
    assert not any(sys.modules.get(name) is module for name, module in stale.items())
    link = chainer.links.Linear(2, 2)
    assert isinstance(link(numpy.ones((1, 2), 'f')), chainer.Variable)
    print('done')
    """)
    assert printed == 'done\n'


def test_import_after_a_failed_import_of_chainer_chemistry(run):
    printed, _ = run("""
    from chainer_bspmm.compat import imports
    for name in [name for name in sys.modules if name.startswith('chainer_chemistry')]:
        del sys.modules[name]
    imports._is_done = False
    HIDE.add('chainer_chemistry.training')
    try:
        import chainer_chemistry
    except ImportError:
        pass
    HIDE.clear()
    stale = {name: module for name, module in sys.modules.items()
             if name.startswith('chainer_chemistry.')}
    assert stale and 'chainer_chemistry' not in sys.modules
    imports.import_upstream()
    assert not any(sys.modules.get(name) is module for name, module in stale.items())
    print('done')
    """)
    assert printed == 'done\n'


def test_chainer_imported_first_is_repaired_in_place(run):
    # Without NumPy 1 and pkg_resources Chainer cannot be imported, and gets help here.
    printed, _ = run("""
        import sys, types, warnings
        warnings.simplefilter('ignore')
        import numpy.testing
        before = dict(sys.modules)
        for name in ('pkg_resources', 'numpy.distutils', 'numpy.distutils.system_info'):
            module = sys.modules[name] = types.ModuleType(name)
        class DistributionNotFound(Exception): pass
        def require(name): raise DistributionNotFound
        sys.modules['pkg_resources'].require = require
        sys.modules['pkg_resources'].DistributionNotFound = DistributionNotFound
        if 'sctypes' not in vars(numpy):
            numpy.sctypes = {'int': [numpy.int32, numpy.int64], 'float': [numpy.float32]}
        import chainer
        for name in ('pkg_resources', 'numpy.distutils', 'numpy.distutils.system_info'):
            del sys.modules[name]
            sys.modules.update({name: before[name]} if name in before else {})
        serialize = chainer.Optimizer.serialize
        import chainer_bspmm
        assert sys.modules['chainer'] is chainer
        assert chainer.Optimizer.serialize is not serialize
        indices = chainer.functions.array.resize_images.compute_indices_and_weights
        v, u, vw, uw = indices((2, 2), (4, 4), 'bilinear', True, numpy)
        print(v.tolist())
    """)
    assert printed == '[0.0, 3.0]\n'


@pytest.mark.parametrize(
    'package, expected',
    [
        (
            'chainer',
            'chainer_bspmm needs Chainer, which is not installed. Its source package does not '
            'build with setuptools 82 or later. Install it with:\n'
            "    pip install 'setuptools<81' wheel\n"
            '    pip install --no-build-isolation chainer==7.8.1',
        ),
        (
            'chainer_chemistry',
            'chainer_bspmm needs Chainer Chemistry, which is not installed. Install it with:\n'
            '    pip install chainer-chemistry==0.7.1',
        ),
    ],
)
def test_missing_package_says_how_to_install_it(run, package, expected):
    printed, _ = run(
        """
        import importlib.util, sys
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == %r else find_spec(name, *a)
        try:
            import chainer_bspmm
        except ImportError as error:
            print(error.name)
            print(error)
            print(sum('chainer_bspmm' in type(finder).__module__ for finder in sys.meta_path))
    """
        % package
    )
    assert printed == '%s\n%s\n0\n' % (package, expected)


@pytest.mark.parametrize('missing', ['six', 'pandas'])  # one needed at once, one later
def test_upstream_that_cannot_be_imported_says_what_to_do(missing):
    printed, _ = run_alone(f"""
    HIDE.add({missing!r})
    try:
        import chainer_bspmm
    except ImportError as error:
        print(error)
    """)
    message = (
        r"(\w+) could not be imported: ModuleNotFoundError\(.*No module named '%s'.*\)\. If \1 was "
        r'imported before chainer_bspmm in this process, restart Python and import chainer_bspmm '
        r'first; it was written for Chainer 7\.8\.1 and Chainer Chemistry 0\.7\.1\.\n'
    )
    assert re.fullmatch(message % missing, printed), printed


def test_missing_rdkit_is_still_warned_about():
    _, errors = run_alone("""
    HIDE.add('rdkit')
    from chainer_bspmm import compat
    """)
    assert 'RDKit is not installed' in errors


def test_applying_again_changes_nothing():
    from chainer_bspmm import compat

    compat.apply()
    from chainer_chemistry.models import GIN
    from chainer_chemistry.training.extensions import roc_auc_evaluator

    before = GIN.__call__, roc_auc_evaluator.metrics, len(sys.meta_path)
    compat.apply()
    assert before == (GIN.__call__, roc_auc_evaluator.metrics, len(sys.meta_path))


def test_finders_without_specs_are_passed_over(monkeypatch):
    from chainer_bspmm.compat import import_hooks
    import chainer_chemistry.models

    (finder,) = (
        found for found in sys.meta_path if isinstance(found, import_hooks._RepairingFinder)
    )
    monkeypatch.setattr(sys, 'meta_path', [finder, object(), *sys.meta_path])
    spec = finder.find_spec('chainer_chemistry.models.gin', chainer_chemistry.models.__path__)
    assert spec.origin.endswith('gin.py')


def test_a_repair_of_a_module_that_was_imported_before_is_applied_at_once(monkeypatch):
    from chainer_bspmm.compat import import_hooks

    module = types.ModuleType('imported_before')
    monkeypatch.setitem(sys.modules, 'imported_before', module)
    monkeypatch.setattr(import_hooks, '_repairs', {})
    repaired = []
    assert import_hooks.repairs('imported_before')(repaired.append) == repaired.append
    assert repaired == [module]
    import_hooks.repairs('never_imported')(repaired.append)
    assert repaired == [module]
