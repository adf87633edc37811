"""Write the tables of docs/performance.md and docs/products.md from the stored results.

``python -m benchmarks.tables`` replaces the text between ``<!-- table: NAME -->`` and
``<!-- end -->``. A table whose results are not stored is left as it is, and its name is printed.
"""

import json
import re

from benchmarks import bench_command
from benchmarks.harness import NAMES, number, RESULTS, ROOT, stored, TITLES
from benchmarks.training import bench_chemprop, bench_two_lines, bench_widths
from benchmarks.training.step_contenders import CAPTURED, DRIVERS, EAGER, EAGER_PACKED, GEOMETRIC
from benchmarks.training.step_contenders import GEOMETRIC_CAPTURED, JAX, ON_DEVICE, PACKED
from benchmarks.training.step_contenders import over_jax, PRECISIONS, ratio, UPSTREAM

PAGES = [ROOT / 'docs' / name for name in ('performance.md', 'products.md')]
BLOCK = re.compile(r'(<!-- table: (\w+) -->\n).*?(<!-- end -->)', re.DOTALL)

SHORT = {
    'NCI compounds shipped with RDKit': 'NCI',
    "QM9's sample in this repository": "QM9's sample",
}
# Data set of bench_quality -> its name in the table, and the digits of its metric.
SETS = {
    'tox21': ('Tox21, mean ROC-AUC', 3),
    'qm9 alpha': ('QM9 alpha, MAE in bohr³', 2),
    'qm9 gap': ('QM9 gap, MAE in hartree', 4),
    'all qm9 alpha': ('all of QM9, alpha', 2),
}


def table(head, rows):
    """Return the lines of a table; numbers get two or three digits, None becomes a dash."""
    lines = [head, ['---'] * len(head), *rows]
    return ['| %s |' % ' | '.join(map(_cell, line)) for line in lines]


def _cell(value):
    if value is None:
        return '-'
    return value if isinstance(value, str) else number(value)


def form(text, value):
    """Format a value by a text such as ``'%.2f'``; None stays None."""
    return None if value is None else text % value


def _steps(result):
    """Yield (data set, method, cells by batch) of a result of bench_steps."""
    for data, of_data in result['data'].items():
        for method, of in of_data['methods'].items():
            yield data, method, of['batches']


def _cells(result):
    """Yield (title, cell) for each method, data set and batch of a result of bench_steps."""
    for data, method, batches in _steps(result):
        for n_batch, cell in sorted(batches.items(), key=lambda item: int(item[0])):
            yield '%s, %s, %s' % (NAMES[data], TITLES[method], f'{int(n_batch):,}'), cell


def _walls(cell, names, digits=None):
    """Return the times of a step of these contenders, None for one that was not run."""
    walls = [cell['milliseconds'].get(name, {}).get('wall', {}).get('median') for name in names]
    return walls if digits is None else [form('%%.%df' % digits, wall) for wall in walls]


def _busy(cell, name):
    busy = cell['milliseconds'].get(name, {}).get('busy')
    return None if busy is None else '%.0f %%' % (100 * busy)


def captured(result):
    """Captured steps of the five models, with batches of 128 of Tox21."""
    heads = {
        UPSTREAM: 'upstream dense',
        EAGER: 'ours, eager',
        CAPTURED: 'ours, captured',
        ON_DEVICE: 'captured, `DeviceDataset`',
        PACKED: 'the same, packed',
        GEOMETRIC: 'PyG',
        GEOMETRIC_CAPTURED: 'PyG captured',
    }
    rows = []
    for data, method, batches in _steps(result):
        if data == 'tox21':
            faster = [
                form('%.0f', ratio(batches[n_batch], ON_DEVICE, UPSTREAM))
                for n_batch in ('128', '32', '1024')
            ]
            cell = batches['128']
            walls = _walls(cell, heads)
            rows.append([TITLES[method], *walls, faster[0], _busy(cell, ON_DEVICE), *faster[1:]])
    return table(['', *heads.values(), 'faster', 'GPU busy', 'batch 32', '1,024'], rows)


def jax(result):
    """Captured steps beside JAX's; ratios are the time of JAX's faster driver over ours, packed."""
    heads = {PACKED: 'ours, packed', ON_DEVICE: 'folded', CAPTURED: 'from `SparseDataset`'}
    heads.update((JAX[key], 'JAX %s, %s' % key) for key in JAX)
    rows = [
        [
            title,
            *_walls(cell, heads, 3),
            *(form('%.2f', over_jax(cell, precision)) for precision in ('FP32', 'TF32')),
            _busy(cell, PACKED),
        ]
        for title, cell in _cells(result)
    ]
    head = ['ms a step', *heads.values(), 'FP32: JAX over ours', 'TF32', 'GPU busy']
    return table(head, rows)


def jax_cpu(result):
    """Eager steps beside JAX's, on a CPU; ratios are JAX's time over ours, packed."""
    heads = {EAGER_PACKED: 'ours, packed', EAGER: 'folded'}
    heads.update((JAX[driver, 'FP32'], 'JAX ' + driver) for driver in DRIVERS)
    rows = [
        [
            title,
            *_walls(cell, heads, 1),
            *(form('%.2f', ratio(cell, EAGER_PACKED, JAX[driver, 'FP32'])) for driver in DRIVERS),
        ]
        for title, cell in _cells(result)
    ]
    head = ['ms a step', *heads.values(), *('%s over ours' % driver for driver in DRIVERS)]
    return table(head, rows)


def methods(result):
    """Captured steps of every method beside upstream's, at the largest batch that has both."""
    rows = []
    for _, method, batches in _steps(result):
        row = ['`%s`' % method] + [None] * 6
        for n_batch, cell in batches.items():
            name = ON_DEVICE if ON_DEVICE in cell['milliseconds'] else CAPTURED
            times = ratio(cell, name, UPSTREAM)
            if times is not None:
                row[1:] = [
                    n_batch,
                    '`DeviceDataset`' if name == ON_DEVICE else 'dense examples',
                    *_walls(cell, [UPSTREAM, name]),
                    '%.3g' % times,
                    _busy(cell, name),
                ]
                break
        rows.append(row)
    return table(
        ['method', 'batch', 'data', 'upstream dense, ms', 'ours captured, ms', 'faster']
        + ['GPU busy'],
        rows,
    )


def command(result):
    """Seconds from the start of a command to the saved model, with warm and with empty caches."""
    rows = []
    for data, of_data in result['data'].items():
        for method, of in of_data['methods'].items():
            row = ['%s, %s' % (NAMES[data], TITLES[method])]
            for kind in (bench_command.WARM, bench_command.COLD):
                seconds = {name: of[name][kind]['seconds'] for name in of if kind in of[name]}
                row += [_seconds(of.get(name, {}), kind) for name in bench_command.OPTIONS]
                both = [seconds.get(n) for n in (bench_command.UPSTREAM, bench_command.CAPTURED)]
                row.append(None if None in both else both[0] / both[1])
            rows.append(row)
    head = [*bench_command.OPTIONS, 'faster']
    return table(['seconds', *head, 'empty caches: ' + head[0], *head[1:]], rows)


def _seconds(of, kind):
    """Return the seconds of a contender's runs as text, with notes about them."""
    if kind not in of:
        return None
    about = 'about ' if of[kind]['is_extrapolated'] else ''
    return about + number(of[kind]['seconds']) + '*' * ('commit' in of)


def large(result):
    """Products with one large graph beside cuSPARSE's."""
    rows = []
    for case in result['cases']:
        for point in case['points']:
            times = {name: of['median'] for name, of in point['microseconds'].items()}
            ours = times['auto']
            cusparse = [times[name] for name in times if 'cuSPARSE' in name]
            others = times['cuSPARSE csr alg3'], min(cusparse)
            ratios = ['%.2f' % (other / ours) for other in others]
            rows.append([case['name'], str(point['n_B']), '%.0f' % ours, *ratios])
    than = "times faster than cuSPARSE's deterministic algorithm", "... than cuSPARSE's fastest"
    return table(['matrix', 'n_B', 'ours, us', *than], rows)


def sell(result):
    """y = A x in double precision: our CSR and SELL beside cuSPARSE's, in microseconds."""
    rows = []
    for case in result['cases']:
        if case['dtype'] != 'float64':
            continue
        times = {name: of['median'] for name, of in case['spmv_device_us'].items()}
        best = [
            min(time for name, time in times.items() if name.startswith(kind))
            for kind in ('csr', 'sell', 'cusparse csr', 'cusparse sell')
        ]
        a_row = '%.1f' % (case['nnz'] / case['rows'])
        rows.append([case['name'], f'{case["rows"]:,}', a_row, *best])
    head = ['us', 'rows', 'entries a row', 'our CSR', 'our SELL']
    return table([*head, "cuSPARSE's CSR", "cuSPARSE's SELL"], rows)


def network(result):
    """Captured steps on one large graph beside upstream's and PyTorch Geometric's."""
    rows = []
    times = {}
    for name, found in result['networks'].items():
        times = found['milliseconds']
        title = '{}: {nodes:,} nodes, {citations:,} undirected edges'.format(name, **found['size'])
        rows.append([title, *(time['median'] for time in times.values())])
    return table(['milliseconds', *times], rows)


def quality(result):
    """Test metrics: mean and standard deviation over the seeds."""
    heads = {
        'dense': 'upstream dense',
        'folded': 'folded',
        'folded to the largest': 'folded to the largest',
        'packed': 'packed',
    }
    rows = []
    for data, (title, digits) in SETS.items():
        for method, arms in result['summary'].get(data, {}).items():
            row = ['%s, %s' % (TITLES[method], title)]
            for arm in heads:
                found = arms.get(arm, {'mean': None, 'standard deviation': None})
                values = found['mean'], found['standard deviation']
                parts = ['%.*f' % (digits, value) for value in values if value is not None]
                row.append(' ± '.join(parts) or None)
            rows.append(row)
    return table(['', *heads.values()], rows)


def tf32_errors(result):
    """Errors of loss and gradients of a step against float64, ours and upstream's."""
    heads = {
        bench_widths.OURS['FP32']: 'ours, FP32',
        bench_widths.OURS['TF32']: 'ours, TF32',
        bench_widths.UPSTREAM_S['FP32']: 'upstream dense, FP32',
        bench_widths.UPSTREAM_S['TF32']: 'upstream dense, TF32',
    }
    rows = []
    for units, methods in sorted(result['errors'].items(), key=lambda item: int(item[0])):
        for method, of in methods.items():
            cells = [
                '%.0e, %.0e' % (of['errors'][name]['loss'], of['errors'][name]['norm'])
                for name in heads
            ]
            rows.append(['%s, %s units' % (TITLES[method], units), *cells])
    return table(['loss, gradients', *heads.values()], rows)


def tf32_trainings(result):
    """Test metrics of trainings in FP32 and TF32, and the mean of their differences."""
    rows = []
    for data, methods in result['summary'].items():
        title, digits = SETS[data]
        for method, of in methods.items():
            row = ['%s, %s' % (TITLES[method], title)]
            row += [' '.join('%.*f' % (digits, metric) for metric in of[p]) for p in PRECISIONS]
            row.append(form('%%+.%df' % (digits + 1), of['mean difference']))
            row.append(form('%%.%df' % (digits + 1), of['standard deviation between seeds']))
            rows.append(row)
    return table(['', *PRECISIONS, 'mean difference', 'standard deviation of seeds'], rows)


def two_lines(result):
    """Epochs with validation of upstream's scripts, with the two lines and with more lines."""
    rows = []
    has_more = False
    names = bench_two_lines.UPSTREAM, bench_two_lines.TWO_LINES, bench_two_lines.MORE_LINES
    for data, method, n_batch, cell in _of_two_lines(result):
        if n_batch != bench_two_lines.PREDICT:
            epochs = cell['seconds an epoch']
            times = [1e3 * epochs[name]['median'] for name in names if name in epochs]
            has_more = len(times) == 3
            where = '%s, %s, batch %s' % (data, TITLES[method], n_batch)
            rows.append([where, *times, '%.1f' % (times[0] / times[1])])
    head = ['ms an epoch', 'upstream', 'two lines']
    more = ['GraphUpdater and DeviceDataset'] * has_more
    return table([*head, *more, 'two lines faster than upstream'], rows)


def two_lines_predict(result):
    """`predict` of upstream's models, on dense examples and on a SparseDataset."""
    rows = []
    names = bench_two_lines.UPSTREAM, bench_two_lines.TWO_LINES, bench_two_lines.SPARSE
    for data, method, n_batch, cell in _of_two_lines(result):
        if n_batch == bench_two_lines.PREDICT:
            upstream, *times = [cell['seconds'][name] for name in names]
            where = '%s, %s, %s molecules' % (data, TITLES[method], f'{cell["molecules"]:,}')
            times = ['%s (%.1f)' % (number(time), upstream / time) for time in times]
            rows.append([where, upstream, *times])
    head = ['s (times faster)', 'upstream', 'two lines, dense examples', 'two lines, SparseDataset']
    return table(head, rows)


def chemprop(result):
    """Seconds and test metrics of chemprop's command and ours, median and range."""
    rows = []
    for data, of in result['data'].items():
        unit, digits = {'qm9': (', bohr³', 2), 'tox21': ('', 3)}[data]
        row = ['%s, %s%s' % (NAMES[data], of['metric'], unit)]
        for name in (bench_chemprop.CHEMPROP, bench_chemprop.OURS):
            tests = [run['test'] for run in of['runs'] if run['contender'] == name]
            row += [of['median'][name]['seconds'], '%.*f' % (digits, of['median'][name]['test'])]
            row.append('%.*f to %.*f' % (digits, min(tests), digits, max(tests)))
        rows.append(row)
    head = ['chemprop, s', 'test metric', 'its range', 'ours, s', 'test metric', 'its range']
    return table(['', *head], rows)


def _of_two_lines(result):
    """Yield (data set, method, batch size or `PREDICT`, cell) of a result of bench_two_lines."""
    for data, of_methods in result['data'].items():
        for method, cells in of_methods.items():
            for n_batch, cell in cells.items():
                yield SHORT.get(data, data), method, n_batch, cell


# Name of a table -> function that makes it, name of the result, whether the result is of a CPU.
TABLES = {
    'two_lines': (two_lines, 'two_lines', False),
    'two_lines_predict': (two_lines_predict, 'two_lines', False),
    'two_lines_cpu': (two_lines, 'two_lines', True),
    'two_lines_predict_cpu': (two_lines_predict, 'two_lines', True),
    'captured': (captured, 'captured', False),
    'jax': (jax, 'jax', False),
    'jax_cpu': (jax_cpu, 'jax', True),
    'command': (command, 'command', False),
    'large': (large, 'large', False),
    'sell': (sell, 'sell', False),
    'network': (network, 'network', False),
    'methods': (methods, 'methods', False),
    'quality': (quality, 'quality', False),
    'chemprop': (chemprop, 'chemprop', True),
    'chemprop_gpu': (chemprop, 'chemprop', False),
}


def page(text, results=RESULTS):
    """Replace the tables of a page; return its text, and names of tables without results."""
    missing = []

    def replaced(found):
        make, name, on_cpu = TABLES[found[2]]
        path = stored(name, on_cpu, results)
        if not path.exists():
            missing.append(found[2])
            return found[0]
        return found[1] + '\n'.join(make(json.loads(path.read_text()))) + '\n' + found[3]

    return BLOCK.sub(replaced, text), missing


def main():
    for path in PAGES:
        text, missing = page(path.read_text())
        path.write_text(text)
        print('wrote %s; not stored: %s' % (path, ', '.join(missing) or 'nothing'))


if __name__ == '__main__':
    main()
