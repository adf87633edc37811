"""Names that byte code uses, which are the same for all versions of Python."""

import pytest

from chainer_bspmm.training.code_names import code_names


def names_of(source):
    """Return the names that the only function of a source text uses."""
    variables: dict = {}
    exec(source, variables)
    return code_names(variables['f'].__code__)


GLOBALS = {
    'def f(): return a': {'a': False},
    'def f(): return len(a)': {'len': False, 'a': False},
    'def f(b): return b': {},
    'def f():\n global a\n a = 1': {'a': True},
    'def f():\n global a\n a += 1': {'a': True},
    'def f():\n global a\n del a': {'a': True},
    'def f(): return lambda: a': {'a': False},
    'def f():\n def g():\n  global a\n  a = 1\n return a, g': {'a': True},
    'def f(): return [b + a for b in ()]': {'a': False},
    # Newer versions compare two local variables in one instruction that names both.
    'def f(b, c): return b < c': {},
    'def f(b, c):\n b = c\n return b': {},
}


@pytest.mark.parametrize('source', GLOBALS)
def test_globals(source):
    assert names_of(source).globals == GLOBALS[source]


def test_variables_that_a_class_within_a_function_reads():
    names = names_of('def f():\n class C:\n  b = a\n return C')
    assert names.globals['a'] is False


ATTRIBUTES = {
    'def f(x): return x.a': {'a': False},
    'def f(x): return x.a.b': {'a': False, 'b': False},
    'def f(x): return x.a()': {'a': False},
    'def f(x): x.a = 1': {'a': True},
    'def f(x): x.a += 1': {'a': True},
    'def f(x): del x.a': {'a': True},
    'def f(x):\n x.a = x.b': {'a': True, 'b': False},
    'def f(x): return lambda: x.a': {'a': False},
    'def f():\n from m import a as b': {'a': False},
    'def f(x): return x["a"]': {},
    'def f(x): return getattr(x, "a", 1.0)': {'a': False},
    'def f(x): setattr(x, "a", x.b)': {'a': True, 'b': False},
    'def f(x): x.__dict__["a"] = 1': {'__dict__': False, 'a': True},
    'def f(x): return lambda: getattr(x, "a") + x["b c"]': {'a': False},
    'def f(x): return "{0.a:g} {b}".format(x, b=1)': {'format': False, 'a': False},
    'def f(x): return "{x.a.b} a.c".format(x=x)': {'format': False, 'a': False, 'b': False},
    'def f(x): x.a = 1; return "{0.a}".format(x)': {'a': True, 'format': False},
    'def f(x, y): return "{0:{1.a}}".format(x, y)': {'format': False, 'a': False},
}


@pytest.mark.parametrize('source', ATTRIBUTES)
def test_attributes(source):
    assert names_of(source).attributes == ATTRIBUTES[source]


def test_attributes_of_a_base_class():
    code = compile('class C:\n def f(self): return super().a(), super().b', 'name', 'exec')
    assert code_names(code).attributes == {'a': False, 'b': False}


def test_names_with_large_indices():
    """Names with large indices need one more instruction in byte code."""
    names = names_of('def f(x): return %s' % ', '.join('a%d + x.b%d' % (i, i) for i in range(600)))
    assert set(names.globals) == {'a%d' % i for i in range(600)}
    assert set(names.attributes) == {'b%d' % i for i in range(600)}


MODULES = {
    'def f():\n import a': {'a'},
    'def f():\n import a.b': {'a.b'},
    'def f():\n import a.b as c': {'a.b'},
    'def f():\n from a.b import c': {'a.b'},
    'def f():\n from . import a': {'.'},
    'def f():\n from .. import a': {'..'},
    'def f():\n from ..a import b': {'..a'},
    'def f():\n def g():\n  import a\n import b': {'a', 'b'},
    'def f(): return a.b': set(),
}


@pytest.mark.parametrize('source', MODULES)
def test_modules(source):
    assert names_of(source).modules == MODULES[source]


def test_a_relative_import_after_many_constants():
    numbers = ', '.join('%d + x' % (1000 + i) for i in range(300))
    names = names_of('def f(x):\n x = %s\n from ..a import b' % numbers)
    assert names.modules == {'..a'}


ANY = {
    'def f(x): return x.a': False,
    'def f(x, n): return getattr(x, n)': True,
    'def f(x, n): setattr(x, n, 1)': True,
    'def f(x): return vars(x)': True,
    'def f(x): return x.__dict__': True,
    'def f(x): return object.__getattribute__(x, "a")': True,
    'def f(x): return operator.attrgetter("a")(x)': True,
    'def f(x): return lambda n: getattr(x, n)': True,
    'def f(x):\n match x:\n  case C(a=1): return 1': True,
}


@pytest.mark.parametrize('source', ANY)
def test_whether_attributes_are_used_without_their_name(source):
    assert names_of(source).uses_any_attribute is ANY[source]


PREFIXES = {
    'def f(x): return getattr(x, "loss_" + x.phase)': {'loss_'},
    'def f(x): return getattr(x, f"loss_{x.phase}")': {'loss_'},
    'def f(x): return getattr(x, "loss_%s" % x.phase)': {'loss_'},
    'def f(x): return getattr(x, "loss_{}".format(x.phase))': {'loss_'},
    'def f(x): return lambda: getattr(x, "loss_" + x.phase)': {'loss_'},
    'def f(x): return getattr(x, "a loss_" + x.phase, "loss")': set(),
    'def f(x): return getattr(x, "w_" + x.phase)': set(),
    'def f(x): return x["loss_" + x.phase]': set(),
}


@pytest.mark.parametrize('source', PREFIXES)
def test_beginnings_of_names_that_are_made(source):
    assert names_of(source).prefixes == PREFIXES[source]


BY_TEXT = {
    'def f(n): return getattr(a, n)': {'a'},
    'def f(n): setattr(a, n, 1)': {'a'},
    'def f(): return vars(a)': {'a'},
    'def f(): return a.__dict__': {'a'},
    'def f(a, n): return getattr(a, n)': set(),
    'def f(): return lambda n: getattr(a, n)': {'a'},
    'def f(n): return a, getattr(n, "b")': set(),
}


@pytest.mark.parametrize('source', BY_TEXT)
def test_variables_whose_attributes_are_used_without_their_name(source):
    assert names_of(source).by_text == BY_TEXT[source]


UNKNOWN = {
    'def f(x): return x': set(),
    'def f(): return globals()["a"]': {'globals'},
    'def f(): return eval("a")': {'eval'},
    'def f(): exec("a")': {'exec'},
    'def f(g): g.__globals__["a"] = 1': {'__globals__'},
    'def f(): return locals()': set(),
    'def f(): return sys.modules["a"].b': {'sys.modules'},
    'def f(x): return x.modules': set(),
    'def f(): return importlib.import_module("a").b': {'import_module'},
    'def f(): return lambda: globals()': {'globals'},
    'def f(): return sys._getframe().f_globals["a"]': {'f_globals'},
    'def f(x): return x.f_back.f_locals': {'f_back', 'f_locals'},
}


@pytest.mark.parametrize('source', UNKNOWN)
def test_names_that_lead_to_unknown_variables(source):
    assert names_of(source).unknown == UNKNOWN[source]


def test_code_is_read_once():
    code = compile('a', 'name', 'eval')
    assert code_names(code) is code_names(code)
