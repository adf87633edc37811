"""MkDocs hooks: pages and links outside of docs/, names on API pages, form of docstrings."""

import importlib
import json
import pathlib
import posixpath
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
# File of the repository -> page of the site. README is the first page, not the list of all pages.
PAGES = {
    'README.md': 'index.md',
    'docs/index.md': 'pages.md',
    'examples/tour.ipynb': 'examples/tour.md',
    'examples/qm9/README.md': 'examples/qm9.md',
    'examples/tox21/README.md': 'examples/tox21.md',
    'examples/own_dataset/README.md': 'examples/own_dataset.md',
    'examples/network_graph/README.md': 'examples/network_graph.md',
    'CONTRIBUTING.md': 'contributing.md',
    'CHANGELOG.md': 'changelog.md',
}
PICTURES = {'examples/tox21/saliency.png': 'examples/tox21_saliency.png'}
SITE = {**PAGES, **PICTURES}
# A link, or a block of code: it is matched as a whole because nothing in it is a link.
LINK = re.compile(r'```.*?```|(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)', re.DOTALL)
SOURCES = {page: source for source, page in SITE.items()}


def on_files(files, config):
    """Add the pages and pictures that are not in docs/."""
    files.remove(files.get_file_from_path('index.md'))
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        if source.endswith('.ipynb'):
            text = _notebook(json.loads(text))
        files.append(File.generated(config, page, content=text))
    for source, picture in PICTURES.items():
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / source)))
    return files


def _notebook(notebook):
    """Return a notebook as Markdown, with its results."""
    parts = []
    for cell in notebook['cells']:
        text = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':
            parts.append(text)
            continue
        parts.append('```python\n%s\n```' % text)
        for output in cell['outputs']:
            data = output.get('data', {})
            if 'image/png' in data:
                parts.append('![](data:image/png;base64,%s)' % data['image/png'].replace('\n', ''))
            elif 'text/html' in data:
                parts.append(''.join(data['text/html']))
            else:
                parts.append('```text\n%s\n```' % ''.join(output.get('text', '')).rstrip())
    return '\n\n'.join(parts)


def on_page_markdown(markdown, page, **_):
    """Expand ``::: package`` of an API page, drop the note above it; mend links out of docs/."""
    markdown = re.sub(r'^This page is made .*?^::: (\S+)$', _members, markdown, flags=re.M | re.S)
    here = page.file.src_uri
    source = SOURCES.get(here, 'docs/' + here)

    def mended(link):
        mark, text, path, anchor = link.groups('')
        if not path or ':' in path:  # a block of code, or a link out of the repository
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = SITE.get(target, target.removeprefix('docs/'))
        if place == target and target not in SITE:  # neither a page nor in docs/
            return text if target.endswith(text.strip('`')) else f'{text} (`{target}`)'
        place = posixpath.relpath(place, posixpath.dirname(here) or '.')
        return f'{mark}[{text}]({place}{anchor})'

    return LINK.sub(mended, markdown)


# What browsers must not break: numbers such as 1e-07 (they break after a dash), cells of tables
# such as (24 → 17), 0.84 ± 0.07, "about 13" and 148 us, and options in code.
UNBROKEN = re.compile(
    r'\(?\d(?:\.\d+)?e-\d+\)?'
    r'|\([\d.]+ → [\d.]+\)'
    r'|[\d.]+ ± [\d.]+'
    r'|about [\d.]+(?=</td>)'
    r'|[\d.,]+ (?:us|KB)(?=</td>)'
    r'|(?<=<code>)--?[\w-]+(?=[ <])'
)


def on_page_content(html, **_):
    """Keep numbers and options on one line."""
    return UNBROKEN.sub(r'<span class="unbroken">\g<0></span>', html)


def _members(match):
    """Return a line ``:::`` for each public name, with the module that defines it.

    A package may hold a function and a module of one name, such as ``functions.bspmm``.
    """
    package = importlib.import_module(match[1])
    names = []
    for name in sorted(package.__all__, key=str.lower):
        member = getattr(package, name)
        module = getattr(member, '__module__', '') if hasattr(member, '__qualname__') else ''
        names.append(f'{module or match[1]}.{name}')
    return '\n\n'.join(f'::: {name}' for name in names)


SECTIONS = re.compile(r'^(?:Args|Attributes|Raises):\n(?:(?: .*)?\n?)*', re.MULTILINE)
# A line of a section that continues an item, because it does not begin one: `name (type): text`.
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
