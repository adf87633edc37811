"""Links of the pages to files and headings have a target, and paths in their text exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/*.md'), *ROOT.glob('examples/**/*.md')])


def without_code(page):
    return re.sub(r'```.*?```', '', page.read_text(), flags=re.DOTALL)


def anchors(page):
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r'^#+ (.*)$', without_code(page), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    for link in re.findall(r'\]\(([^)\s]+)\)', without_code(page)):
        path, _, anchor = link.partition('#')
        if '://' in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_pages_are_found():
    assert {'README.md', 'performance.md', 'captured_training.md'} <= {page.name for page in PAGES}


@pytest.mark.parametrize('page', ['CONTRIBUTING.md', 'docs/architecture.md'])
def test_paths(page):
    """Paths are relative to the repository, the package, or, in a table, its folder training/."""
    text = without_code(ROOT / page)
    paths = re.findall(r'`([\w/.*]+(?:/|\.py|\.cu))`', text)
    assert 'kernels/bspmm_csr.cu' in paths or 'sparse/check.py' in paths
    folders = ROOT, ROOT / 'chainer_bspmm', ROOT / 'chainer_bspmm' / 'training'

    def exists(path):
        return any(list(folder.glob(path)) for folder in folders)

    missing = [path for path in paths if 'NAME' not in path and not exists(path)]
    assert not missing


def test_every_piece_of_captured_steps_is_in_the_table():
    text = (ROOT / 'docs/architecture.md').read_text()
    modules = (ROOT / 'chainer_bspmm/training').glob('[!_]*.py')
    assert [module.name for module in modules if f'`{module.name}`' not in text] == []
