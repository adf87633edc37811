"""Names of global variables, attributes and modules that code uses, read from its byte code."""

import dis
import functools
import re
import types
from typing import NamedTuple

_READS = {'LOAD_GLOBAL', 'LOAD_NAME', 'LOAD_FROM_DICT_OR_GLOBALS'}
_WRITES = {'STORE_GLOBAL', 'DELETE_GLOBAL'}
_ATTRIBUTE_READS = {'LOAD_ATTR', 'LOAD_METHOD', 'LOAD_SUPER_ATTR', 'IMPORT_FROM'}
_ATTRIBUTE_WRITES = {'STORE_ATTR', 'DELETE_ATTR'}

# Code that uses these names may use attributes by names that are only made at run time.
_BY_TEXT = {
    *('getattr', 'setattr', 'hasattr', 'delattr', '__getattribute__'),
    *('vars', '__dict__', 'attrgetter'),
}
# These may also assign or delete such an attribute.
_WRITES_BY_TEXT = {'setattr', 'delattr', 'vars', '__dict__'}
# These names lead to any variable of any module.
_TO_ANYTHING = {
    *('globals', '__globals__', 'exec', 'eval', '__import__', 'import_module'),
    *('f_globals', 'f_locals', 'f_builtins', 'f_back'),
}
# A text with which names of attributes begin, such as 'loss_', 'loss_%s' and 'loss_{}'.
_PREFIX = re.compile(r'(\w{2,}_)(?:%s|\{\w*\})?')
# A replacement field of str.format, and the attributes that it names, as in '{0.options.rate:g}'.
_FIELD = re.compile(r'\{[^{}]*')
_IN_FIELD = re.compile(r'\.(\w+)')


class CodeNames(NamedTuple):
    """Names that a code object uses, functions and classes within it included.

    - `globals`, `attributes`: name -> whether the code assigns or deletes it. `globals` include
      names of builtins.
    - `modules`: names of modules that it imports; relative ones begin with dots.
    - `uses_any_attribute`: whether it may use attributes that it does not name.
    - `prefixes`: texts with which names of such attributes may begin.
    - `by_text`: global variables whose attributes it may use without naming them.
    - `unknown`: names by which it may reach variables that it does not name.
    """

    globals: dict[str, bool]
    attributes: dict[str, bool]
    modules: frozenset[str]
    uses_any_attribute: bool
    prefixes: frozenset[str]
    by_text: frozenset[str]
    unknown: frozenset[str]


@functools.lru_cache(maxsize=4096)
def code_names(code: types.CodeType) -> CodeNames:
    """Find the names that code uses. Do not change the result: calls share it."""
    variables: dict[str, bool] = {}
    attributes: dict[str, bool] = {}
    modules = set()
    by_text = set()
    matches_classes = False
    instructions = [each for each in dis.get_instructions(code) if each.opname != 'EXTENDED_ARG']
    for i, each in enumerate(instructions):
        if each.opname in _READS:
            variables.setdefault(each.argval, False)
            # Such as `settings` in `getattr(settings, name)` and in `settings.__dict__`.
            after = instructions[i + 1]
            is_read = after.opname in _ATTRIBUTE_READS and after.argval in _BY_TEXT
            if is_read or instructions[i - 1].argval in _BY_TEXT:
                by_text.add(each.argval)
        elif each.opname in _WRITES:
            variables[each.argval] = True
        elif each.opname in _ATTRIBUTE_READS:
            attributes.setdefault(each.argval, False)
        elif each.opname in _ATTRIBUTE_WRITES:
            attributes[each.argval] = True
        elif each.opname == 'IMPORT_NAME':
            # The two instructions before it load the level of a relative import and the names.
            modules.add('.' * instructions[i - 2].argval + each.argval)
        elif each.opname == 'MATCH_CLASS':
            matches_classes = True
    for text in code.co_consts:
        if isinstance(text, str):  # str.format reads the attributes that it names
            for field in _FIELD.findall(text):
                for name in _IN_FIELD.findall(field):
                    attributes.setdefault(name, False)
    inner = [code_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    for names in inner:
        for merged, more in ((variables, names.globals), (attributes, names.attributes)):
            for name, is_written in more.items():
                merged[name] = merged.get(name, False) or is_written
        modules |= names.modules
        by_text |= names.by_text
    used = variables.keys() | attributes.keys()
    prefixes = set()
    if used & _BY_TEXT:
        texts = [text for text in code.co_consts if isinstance(text, str)]
        prefixes = {match[1] for match in map(_PREFIX.fullmatch, texts) if match}
        is_written = not used.isdisjoint(_WRITES_BY_TEXT)
        for text in filter(str.isidentifier, texts):  # as in `getattr(x, 'name')`
            attributes[text] = attributes.get(text, False) or is_written
    unknown = used & _TO_ANYTHING
    if 'sys' in variables and 'modules' in attributes:
        unknown.add('sys.modules')
    return CodeNames(
        variables,
        attributes,
        frozenset(modules),
        matches_classes
        or bool(used & _BY_TEXT)
        or any(names.uses_any_attribute for names in inner),
        frozenset(prefixes.union(*(names.prefixes for names in inner))),
        frozenset(by_text),
        frozenset(unknown),
    )
