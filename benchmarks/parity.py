"""How far are our models from Chainer Chemistry's, for every model and option that it can run?

``tests/support/parity.py`` has the cases and the comparison. ``python -m benchmarks.parity`` writes
``benchmarks/results/cpu/parity.json``. With ``--gpu`` the sparse models run on a GPU, and the file
is ``benchmarks/results/<gpu>/parity.json``. With ``--page`` it makes ``docs/parity.md`` from these
files.
"""

import json
import pathlib
import re

import chainer_bspmm  # NOQA: F401  (before chainer)
import chainer

from benchmarks.harness import argument_parser, conditions, place, RESULTS, resumed, ROOT, save
from chainer_bspmm.sparse.check import LAYOUTS
from tests.support.molecules import SIZES
from tests.support.parity import ALL_CASES, COLUMNS, compare, crash, CRASHES, failures
from tests.support.parity import FLOAT32, FLOAT64, OWN_ERRORS

PAGE = ROOT / 'docs' / 'parity.md'

PAGE_INTRO = """\
# Parity with Chainer Chemistry

This page, written by `python -m benchmarks.parity`, compares every model of Chainer Chemistry that
`sparsify` swaps, sparse with dense, with every option that Chainer Chemistry itself can run. It
compares the output and the gradient of every parameter; all of their errors are in
[benchmarks/results/cpu/parity.json](../benchmarks/results/cpu/parity.json).

- **packed**: one batch without padding, against the dense model run on each molecule alone. With
  batch normalisation, which looks at the whole batch, all molecules have the same size.
- **folded**: `CSRConverter(layout='folded')`, against the dense model on the padded batch, phantom
  atoms included. **padded**: the same comparison for `CSRConverter(layout='padded')`. **masked**:
  with `is_real_node`. For the maximum of RSGCN_GWM, whose phantom atoms would tie except for
  rounding, all molecules have the same size.
- GINSparse and RelGCNSparse take lists of edges, which Chainer Chemistry does not pad: its models
  and ours run one packed batch.
- A number is the relative error norm in float32 against the dense model in float64, followed in
  brackets by the error of the dense model in float32. For gradients it is the error of the
  parameter that is closest to its bound. A gradient that is 0 except for rounding is compared with
  the norm of all gradients.
- The bound is max({float32:g}, {own} times the number in brackets). In float64 (last column, the
  largest of the row) it is {float64:g}.
- Rows beyond a bound: {beyond}. On {machine}.
{others}- Molecules are random, of {sizes} atoms; relations are not symmetric, no two
  atoms are equivalent. Dropout is off: its random numbers depend on the shape of the batch.
- Options are named after arguments: "tied" and "untied" are `weight_tying`, "concatenated"
  `concat_hidden`, "scaled" `scale_adj`, "within" `softmax_mode`, "slope" `negative_slope`, "atom
  types" `n_atom_types`, "activated" an `activation`, "few degrees" `max_degree`, "off"
  `with_gwm=False` or `with_wle=False`. "Features" are nodes with features instead of ids; "wide"
  has 33 hidden channels.
"""
PAGE_CRASHES = """
Options that Chainer Chemistry's constructor accepts, but its forward pass does not:

| model | options | error |
|---|---|---|"""


def run(device, commit, out):
    """Compare the cases that the stored result lacks; return all, and the path of the file."""
    head = {
        'method': 'Relative error norms against the dense model in float64. Bounds: float32 '
        'max(%g, %g x the error of the dense model in float32), float64 %g'
        % (FLOAT32, OWN_ERRORS, FLOAT64),
        'conditions': {**conditions(commit, device), 'n_molecules': len(SIZES)},
        'columns': list(COLUMNS),
    }
    folder = out / place(head)
    result = resumed('parity', head, folder)
    cases = result.setdefault('cases', [])
    done = {(case['model'], case['options']) for case in cases}
    for case in ALL_CASES:
        if (case.model, case.options) in done:
            continue
        found = compare(case, device)
        beyond = failures(found)
        print('%s, %s: %s' % (case.model, case.options, '; '.join(beyond) or 'ok'), flush=True)
        cases.append(
            {
                'model': case.model,
                'options': case.options,
                'failures': beyond,
                'layouts': {layout: _short(names) for layout, names in found.items()},
            }
        )
        save('parity', result, folder, dumps(result))
    result['upstream fails'] = [
        {'model': case.model, 'options': case.options, 'error': crash(case)} for case in CRASHES
    ]
    return result, save('parity', result, folder, dumps(result))


def _short(names):
    """Return lists of `COLUMNS`, rounded to two digits, because the file has thousands of them."""
    return {name: [float('%.1e' % e[column]) for column in COLUMNS] for name, e in names.items()}


def _cells(names):
    """Return the errors of output and worst gradient, as texts ``ours (upstream's own)``."""

    def cell(e):
        return '%.0e (%.0e)' % (e[1], e[0])

    def excess(name):
        return names[name][1] / max(FLOAT32, OWN_ERRORS * names[name][0])

    worst = max((name for name in names if name != 'output'), key=excess)
    return [cell(names['output']), cell(names[worst])]


def table(result):
    """Return the results as lines of Markdown."""
    lines = [
        '| model | options |%s float64 |'
        % ''.join(' %s: output | gradients |' % layout for layout in LAYOUTS),
        '|---' * (3 + 2 * len(LAYOUTS)) + '|',
    ]
    model = None
    for case in result['cases']:
        for suffix in ('', ', masked'):
            found = [case['layouts'].get(layout + suffix) for layout in LAYOUTS]
            if not any(found):
                continue
            errors = [e[2] for names in found if names for e in names.values()]
            row = [case['model'] if case['model'] != model else '', case['options'] + suffix]
            for names in found:
                row += _cells(names) if names else ['', '']
            lines.append(re.sub(' +', ' ', '| %s | %.0e |' % (' | '.join(row), max(errors))))
            model = case['model']
    return lines


def page(folder):
    """Return the text of docs/parity.md, from the files ``folder/*/parity.json``."""
    stored = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(folder.glob('*/parity.json'))
    }
    result = stored.pop('cpu')
    intro = PAGE_INTRO.format(
        sizes=', '.join(map(str, sorted(SIZES))),
        float32=FLOAT32,
        float64=FLOAT64,
        own=OWN_ERRORS,
        beyond=_beyond(result),
        machine=_machine(result),
        others=''.join(
            '- On %s: rows beyond a bound: %s.\n' % (_machine(other), _beyond(other))
            for other in stored.values()
        ),
    )
    crashes = [
        '| %s | %s | `%s` |' % (c['model'], c['options'], c['error'])
        for c in result['upstream fails']
    ]
    return '\n'.join([intro, *table(result), PAGE_CRASHES, *crashes, ''])


def _beyond(result):
    n_failed = sum(bool(case['failures']) for case in result['cases'])
    return '%d of %d' % (n_failed, len(result['cases']))


def _machine(result):
    of = result['conditions']
    return '%s, Python %s, NumPy %s%s, commit %s, %s' % (
        of.get('gpu') or of['cpu'],
        of['python'],
        of['numpy'],
        ', CuPy ' + of['cupy'] if 'cupy' in of else '',
        of['commit'],
        of['date'],
    )


def dumps(result):
    """Return the text of the file: indented JSON, with a list of numbers or names on one line."""
    return (
        re.sub(
            r'\[[^][{}]*\]',
            lambda part: ' '.join(part.group().split()),
            json.dumps(result, indent=1),
        )
        + '\n'
    )


def main(argv=None):
    parser = argument_parser(' '.join(__doc__.split('\n\n')[0].split()))
    parser.add_argument('--gpu', action='store_true', help='run the sparse models on a GPU')
    parser.add_argument(
        '--page', action='store_true', help='only write docs/parity.md, from the stored files'
    )
    args = parser.parse_args(argv)
    results = pathlib.Path(args.out or RESULTS)
    if args.page:
        PAGE.write_text(page(results))
        return 0
    device = chainer.get_device('@cupy:0' if args.gpu else '@numpy')
    device.use()
    result, path = run(device, args.commit, results)
    print('wrote', path)
    return 1 if any(case['failures'] for case in result['cases']) else 0


if __name__ == '__main__':
    raise SystemExit(main())
