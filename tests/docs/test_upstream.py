"""docs/upstream.md: its programs print the output that follows them."""

import re

import pytest

from chainer_bspmm.models import METHODS
from chainer_bspmm.models.set_up_predictor import EDGE_LIST_METHODS, REFUSED
from tests.support.processes import ROOT

PAGE = ROOT / 'docs' / 'upstream.md'
LISTINGS = re.findall(r'```python\n(.*?)```\n\n```text\n(.*?)```', PAGE.read_text(), re.DOTALL)


def test_scripts_name_every_method():
    section = PAGE.read_text().split("## Upstream's example scripts")[1].split('\n## ')[0]
    named = set(re.findall(r'`(\w+)`', section))
    variants = {base + end for base in named for end in ('_wle', '_cwle', '_gwle') if end in named}
    assert {*METHODS, *EDGE_LIST_METHODS, *REFUSED, 'mpnn'} <= named | variants


def test_every_program_has_its_output():
    assert len(LISTINGS) == PAGE.read_text().count('```python') == 4


@pytest.mark.parametrize(
    'program, output',
    LISTINGS,
    ids=[program.split('\n')[-2].strip()[:30] for program, _ in LISTINGS],
)
def test_output(forks, program, output):
    if 'rdkit' in program or 'SmilesParser' in program:
        pytest.importorskip('rdkit')
    done = forks.run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
