"""docs/performance.md, README.md: tables and numbers in the text agree with the stored results."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / 'docs' / 'performance.md').read_text()


def stored(name):
    return json.loads((ROOT / 'benchmarks/results/nvidia-h200' / name).read_text())


def rows(first, title):
    """Return the first cell and the others of a table's rows, by the text that its head has."""
    head = PAGE.index(title)
    lines = PAGE[head : PAGE.index('\n\n', head)].splitlines()[2:]
    found = [[cell.strip(' *') for cell in line.strip('|').split('|')] for line in lines]
    assert len(found) == first
    return {name: cells for name, *cells in found}


def agrees(cell, value):
    """Say whether a cell is a value rounded to the cell's digits; '-' is None."""
    if cell == '-' or value is None:
        return cell == '-' and value is None
    text = cell.rstrip(' %').replace(',', '')
    unit = (
        10.0 ** -len(text.partition('.')[2])
        if '.' in text
        else 10.0 ** (len(text) - len(text.rstrip('0')))
    )
    return abs(float(text) - value) <= 0.5001 * unit


@pytest.mark.parametrize(
    'cell, value, expected',
    [
        ('0.33', 0.326, True),
        ('0.33', 0.335, True),
        ('0.33', 0.336, False),
        ('97 %', 97.4, True),
        ('97 %', 98, False),
        ('611,000', 610678, True),
        ('611,000', 612000, False),
        ('-', None, True),
        ('-', 1, False),
        ('1', None, False),
    ],
)
def test_agrees(cell, value, expected):
    assert agrees(cell, value) == expected


def assert_agree(cells, values):
    assert len(cells) == len(values)
    for cell, value in zip(cells, values):
        assert agrees(cell, value), (cell, value)


def test_captured_steps():
    methods = stored('captured.json')['data']['tox21']['methods']
    contenders = (
        'upstream dense',
        'ours eager',
        'ours captured',
        'ours captured, DeviceDataset',
        'PyTorch Geometric',
        'PyTorch Geometric captured',
    )
    for name, cells in rows(5, '| | upstream dense | ours, eager | ours, captured').items():
        times = {
            n_batch: of['milliseconds'] for n_batch, of in methods[name.lower()]['batches'].items()
        }
        walls = {
            n_batch: [of[key]['wall']['median'] if key in of else None for key in contenders]
            for n_batch, of in times.items()
        }
        ratios = {n_batch: wall[0] / wall[3] for n_batch, wall in walls.items()}
        busy = times['128'][contenders[3]]['busy'] * 100
        assert_agree(cells, [*walls['128'], ratios['128'], busy, ratios['32'], ratios['1024']])


def test_screening():
    data = stored('screening.json')['data']
    for name, cells in rows(10, '| | upstream | ours, from `SparseDataset`').items():
        method, data_set = name.lower().split(', ')
        rates = data[data_set]['methods'][method]['molecules a second']
        plain, parsed = rates['without parsing'], rates['with parsing']
        assert_agree(
            cells,
            [
                of['median']
                for of in (
                    plain['upstream dense'],
                    plain['ours captured'],
                    plain['ours captured, DeviceDataset, once captured'],
                    parsed['upstream dense'],
                    parsed['ours captured'],
                )
            ],
        )


def test_quality():
    summary = stored('quality.json')['summary']
    for name, cells in rows(4, '| | upstream dense | ours, padded').items():
        method, data_set = name.lower().split(', ')[:2]
        models = summary[data_set][method]
        assert_agree(
            [part for cell in cells for part in cell.split(' ± ')],
            [
                models[model][key]
                for model in ('dense', 'padded', 'packed', 'captured')
                for key in ('mean', 'standard deviation')
            ],
        )


@pytest.mark.parametrize('page', ['README.md', 'docs/methods.md'])
def test_quality_in_the_text(page):
    models = stored('quality.json')['summary']['qm9']['relgcn']
    text = ' '.join((ROOT / page).read_text().split())
    errors = re.findall(
        r"RelGCN's mean absolute error is (.*?) bohr³ (packed|padded)(?:,| and) (.*?) "
        r'(packed|padded)',
        text,
    )
    ((first, one, second, other),) = errors
    assert {one, other} == {'packed', 'padded'}
    assert_agree([first, second], [models[one]['mean'], models[other]['mean']])
