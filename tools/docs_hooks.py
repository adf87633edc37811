"""What mkdocs.yml cannot say: the names of the API pages, links out of docs/, docstrings."""

import importlib
import re

import griffe


def on_page_markdown(markdown, **_):
    """Expand ``::: package`` of an API page, drop what is above it; name files outside docs/."""
    markdown = re.sub(r'^This page is made .*?^::: (\S+)$', _members, markdown, flags=re.M | re.S)
    return re.sub(r'(?<!!)\[([^\]]+)\]\((?:\.\./)+([^)\s]+)\)', _outside, markdown)


def _members(match):
    """One ``:::`` for each public name, by the module that defines it.

    A package may hold a function and a module of one name, such as ``functions.bspmm``.
    """
    package = importlib.import_module(match[1])
    names = []
    for name in sorted(package.__all__, key=str.lower):
        member = getattr(package, name)
        module = getattr(member, '__module__', '') if hasattr(member, '__qualname__') else ''
        names.append(f'{module or match[1]}.{name}')
    return '\n\n'.join(f'::: {name}' for name in names)


def _outside(link):
    text, path = link.groups()
    return text if path.endswith(text.strip('`')) else f'{text} (`{path}`)'


SECTIONS = re.compile(r'^(?:Args|Attributes|Raises):\n(?:(?: .*)?\n?)*', re.MULTILINE)
# A line of a section that begins no item, such as `name (type): text`: it continues the last one.
CONTINUED = re.compile(r'^ {4}(?! |\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*(?: \(.*\))?:)', re.MULTILINE)


class Docstrings(griffe.Extension):
    """Put docstrings into the form that griffe reads: ``name`` for ``:func:`name```, and so on."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            text = re.sub(r':(?:attr|class|data|exc|func|meth|mod):`~?', '`', obj.docstring.value)
            text = re.sub(r'^Example:$', 'Examples:', text, flags=re.MULTILINE)
            obj.docstring.value = SECTIONS.sub(
                lambda section: CONTINUED.sub(' ' * 8, section[0]), text
            )
