"""examples/tour.ipynb was stored after a complete run, and runs again."""

import pathlib
import re

import pytest

from tests.examples.scripts import EXAMPLES

nbformat = pytest.importorskip('nbformat')
nbclient = pytest.importorskip('nbclient')

PATH = pathlib.Path(EXAMPLES, 'tour.ipynb')


def printed(notebook):
    """Return the text that a notebook has printed, without the digits of its numbers."""
    text = ''.join(
        output.get('text', '')
        for cell in notebook.cells
        for output in cell.get('outputs', [])
        if output.get('name') == 'stdout'
    )
    return re.sub(r'\d[\d.]*(e-\d+)?', '#', text)


@pytest.mark.slow
def test_tour(monkeypatch):
    # The kernel gets one thread: on a busy machine small products are much slower on several.
    monkeypatch.setenv('OPENBLAS_NUM_THREADS', '1')
    notebook = nbformat.read(PATH, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == 'code']
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    stored = printed(notebook)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={'metadata': {'path': PATH.parent}}
    ).execute()
    assert printed(notebook) == stored
    assert 'SwapCheck(equal=True' in stored
    pictures = sum('image/png' in str(cell.get('outputs')) for cell in code)
    assert pictures == 3
