"""Write the tables of the pages from the stored results.

``python -m benchmarks.tables`` replaces the text between ``<!-- table: NAME -->`` and
``<!-- end -->``. A table whose results are not stored is left as it is, and its name is printed.
"""

import argparse
import functools
import itertools
import json
import re

from benchmarks import answers as of_answers
from benchmarks import bench_command
from benchmarks.harness import NAMES, number, RESULTS, ROOT, stored, TITLES
from benchmarks.training import bench_chemprop, bench_two_lines, bench_widths
from benchmarks.training.step_contenders import CAPTURED, DRIVERS, EAGER, EAGER_PACKED, GEOMETRIC
from benchmarks.training.step_contenders import GEOMETRIC_CAPTURED, JAX, ON_DEVICE, PACKED
from benchmarks.training.step_contenders import over_jax, PRECISIONS, ratio, UPSTREAM

PAGES = [
    ROOT / 'README.md',
    *(
        ROOT / 'docs' / (name + '.md')
        for name in ('performance', 'products', 'learning', 'several_gpus')
    ),
]
BLOCK = re.compile(r'(<!-- table: (\w+) -->\n).*?(<!-- end -->)', re.DOTALL)

SHORT = {
    'NCI compounds shipped with RDKit': 'NCI',
    "QM9's sample in this repository": "QM9's sample",
}
WIDTHS = '64', '256'  # units of the layers in the table and the picture of steps by width
WAITING = 0.9  # share of a step below which a GPU that is busy waits for the host
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


def _faster(before, after):
    """Return how many times as fast, and the two times, as text; None if one is missing."""
    if before is None or after is None:
        return None
    return '%s (%s → %s)' % tuple(map(number, (before / after, before, after)))


def _by_model(first, rows):
    """Return a table with a column for each model; `rows`: title -> method -> cell."""
    found = {method for row in rows.values() for method in row}
    methods = [method for method in TITLES if method in found]
    lines = [[title, *(row.get(method) for method in methods)] for title, row in rows.items()]
    return table([first, *(TITLES[method] for method in methods)], lines)


def answers(*results):
    """Questions of a reader, with their answers."""
    return table(
        ['question', 'answer'], [list(row) for row in of_answers.answers(*results).items()]
    )


def _steps(result):
    """Yield (data set, method, cells by batch) of a result of bench_steps."""
    for data, of_data in result['data'].items():
        for method, of in of_data['methods'].items():
            yield data, method, of['batches']


def _beside_jax(result, ours, digits, ratios):
    """Return a table of our milliseconds in each cell, with ratios of JAX's time to ours.

    `ratios`: name -> function of a cell, which returns the ratio or None.
    """
    rows = {}
    for data, method, batches in _steps(result):
        for n_batch, cell in sorted(batches.items(), key=lambda item: int(item[0])):
            (wall,) = _walls(cell, [ours])
            found = [form('%.2f', over(cell)) or '-' for over in ratios.values()]
            row = rows.setdefault('%s, batch %s' % (NAMES[data], f'{int(n_batch):,}'), {})
            row[method] = '%s (%s)' % (', '.join(found), form('%%.%df' % digits, wall) or '-')
    return _by_model("JAX's time divided by ours: %s (our ms)" % ', '.join(ratios), rows)


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
    """Captured steps beside JAX's; ratios are of the faster of jit and scan, to ours, packed."""
    ratios = {'FP32': of_answers.over_jax_in_fp32, 'TF32': of_answers.over_jax_in_tf32}
    return _beside_jax(result, PACKED, 3, ratios)


def jax_cpu(result):
    """Eager steps beside JAX's, on a CPU; ratios are JAX's time over ours, packed."""
    ratios = {
        driver: functools.partial(ratio, name=EAGER_PACKED, over=JAX[driver, 'FP32'])
        for driver in DRIVERS
    }
    return _beside_jax(result, EAGER_PACKED, 1, ratios)


VARIANTS = {'': 'plain', '_gwm': 'GWM', '_wle': 'WLE', '_cwle': 'CWLE', '_gwle': 'GWLE'}


def methods(result):
    """Captured steps of every method beside upstream's, at the largest batch that has both."""
    rows = {}
    for _, method, batches in _steps(result):
        base, _, variant = method.partition('_')
        row = rows.setdefault(base, dict.fromkeys(VARIANTS))
        for n_batch, cell in batches.items():
            name = ON_DEVICE if ON_DEVICE in cell['milliseconds'] else CAPTURED
            text = _faster(*_walls(cell, [UPSTREAM, name]))
            if text is not None:
                at = '' if n_batch == '128' else ', batch ' + n_batch
                row['_' * bool(variant) + variant] = text + at
                break
    head = ['batch 128: times as fast (ms)', *VARIANTS.values()]
    return table(head, [[TITLES[base], *row.values()] for base, row in rows.items()])


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


def command_short(result):
    """Rows for README: a data set and method in each column, warm and empty caches."""
    cells = {
        '%s: %s' % (NAMES[data], TITLES[method]): of
        for data, of_data in result['data'].items()
        for method, of in of_data['methods'].items()
    }
    names = {
        bench_command.UPSTREAM: "Chainer Chemistry's dense model",
        bench_command.CAPTURED: 'with chainer_bspmm',
    }
    rows = []
    for kind, when in ((bench_command.WARM, ''), (bench_command.COLD, 'first run: ')):
        for name, title in names.items():
            seconds = [_seconds(of.get(name, {}), kind) for of in cells.values()]
            rows.append([when + title, *seconds])
    return table(['seconds to the saved model, 20 epochs', *cells], rows)


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
    than = "times as fast as cuSPARSE's deterministic algorithm", "... as cuSPARSE's fastest"
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


def widths(result):
    """Captured steps beside upstream's, of layers of some widths, with batches of 128."""
    rows = {}
    for units in WIDTHS:
        for method, of in result['data'].get(units, {}).items():
            for precision in PRECISIONS:
                cell = of['batches'].get('128', {'milliseconds': {}})
                names = bench_widths.UPSTREAM_S[precision], bench_widths.OURS[precision]
                row = rows.setdefault('%s units, %s' % (units, precision), {})
                row[method] = _faster(*_walls(cell, names))
    return _by_model('batch 128: times as fast (ms a step)', rows)


def _over_jax(cell):
    """Return JAX's time over ours in FP32 and TF32 as one text, None if one was not run."""
    over = [over_jax(cell, precision, bench_widths.OURS[precision]) for precision in PRECISIONS]
    return None if None in over else '%.2f, %.2f' % tuple(over)


def widths_jax(result):
    """Captured steps beside JAX's, of layers of all widths, as in `jax`."""
    rows = {}
    for (units, method, n_batch), cell in bench_widths.cells(result['data']):
        over = _over_jax(cell)
        if over is not None:
            title = '%s units, batch %s' % (units, f'{int(n_batch):,}')
            rows.setdefault(title, {})[method] = over
    return _by_model("JAX's time divided by ours: FP32, TF32", rows)


def widths_host(first, second):
    """JAX's time over that of captured steps, where these wait for the host in one of two runs."""
    cells_of_second = dict(bench_widths.cells(second['data']))
    rows = []
    for key, cell in bench_widths.cells(first['data']):
        cells = [cell, cells_of_second.get(key)]
        if None in cells or _over_jax(cell) is None:
            continue
        busy = [
            [each['milliseconds'][bench_widths.OURS[precision]]['busy'] for precision in PRECISIONS]
            for each in cells
        ]
        if min(map(min, busy)) < WAITING:
            units, method, n_batch = key
            row = ['%s, %s units, batch %s' % (TITLES[method], units, f'{int(n_batch):,}')]
            for each, (fp32, tf32) in zip(cells, busy):
                row += [_over_jax(each), '%.0f, %.0f %%' % (100 * fp32, 100 * tf32)]
            rows.append(row)
    head = ["JAX's time divided by ours: FP32, TF32", 'first run', 'GPU busy', 'second run']
    return table([*head, 'GPU busy'], rows)


def widths_products(result):
    """Device times of captured steps of wide layers, over the times of their products alone."""
    rows = {}
    for units, methods in sorted(result['data'].items(), key=lambda item: int(item[0])):
        for n_batch, precision in itertools.product(('128', '1024'), PRECISIONS):
            title = '%s units, batch %s, %s' % (units, f'{int(n_batch):,}', precision)
            for method, of in methods.items():
                cell = of['batches'].get(n_batch, {'milliseconds': {}})
                over = bench_widths.over_products(cell, precision)
                if over is not None and int(units) >= bench_widths.WIDE:
                    device = cell['milliseconds'][bench_widths.OURS[precision]]['device']
                    rows.setdefault(title, {})[method] = '%.2f (%s)' % (over, number(device))
    return _by_model("device time of a step divided by its products' (ms of the step)", rows)


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
    return table(['relative errors: loss, gradients', *heads.values()], rows)


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
    """Epochs with validation of upstream's scripts, before and after the two lines."""
    rows = {}
    for data, method, n_batch, cell in _of_two_lines(result):
        if n_batch != bench_two_lines.PREDICT:
            seconds = cell['seconds an epoch']
            names = bench_two_lines.UPSTREAM, bench_two_lines.TWO_LINES
            times = [1e3 * seconds[name]['median'] for name in names]
            rows.setdefault('%s, batch %s' % (data, n_batch), {})[method] = _faster(*times)
    return _by_model('times as fast (ms an epoch)', rows)


def two_lines_predict(result):
    """`predict` of upstream's models, on dense examples and on a SparseDataset."""
    rows = {}
    names = {bench_two_lines.TWO_LINES: 'dense examples', bench_two_lines.SPARSE: 'SparseDataset'}
    for data, method, n_batch, cell in _of_two_lines(result):
        if n_batch == bench_two_lines.PREDICT:
            for name, title in names.items():
                row = rows.setdefault('%s, %s' % (data, title), {})
                seconds = cell['seconds']
                row[method] = _faster(seconds[bench_two_lines.UPSTREAM], seconds[name])
    return _by_model('times as fast (s)', rows)


def scaling(result):
    """Steps of one GPU, and the efficiency and the speed-up of several."""
    rows = []
    several = sorted((int(n) for n in result['ranks'] if n != '1'))
    head = ['model', 'gradients', 'exchange of two']
    alone = result['ranks']['1']['methods']
    for method, of in result['summary'].items():
        cells = alone[method]
        n_bytes = next(iter(cells.values()))['bytes of gradients']
        exchange = result['ranks']['2']['methods'][method]['128']['exchange alone, us']
        row = [TITLES[method], '%.0f KB' % (n_bytes / 1e3), '%.1f us' % exchange]
        for n_batch, shares in of['weak'].items():
            row.append('%s us' % f'{1e3 * cells[n_batch]["wall"]["median"]:,.0f}')
            row += ['%.2f' % shares[str(n)]['measured'] for n in several]
        row += ['%.2f' % of['strong'][str(n)] for n in several]
        rows.append(row)
    for n_batch in next(iter(result['summary'].values()))['weak']:
        head.append('batch %s: one GPU' % f'{int(n_batch):,}')
        head += ['%d GPUs' % n for n in several]
    head += ['1,024 shared by %d' % n for n in several]
    return table(head, rows)


def chemprop(on_cpu, on_gpu):
    """Seconds and test metrics of chemprop's command and ours, median and range."""
    rows = []
    for place, result in (('CPU', on_cpu), ('GPU', on_gpu)):
        for data, of in result['data'].items():
            unit, digits = {'qm9': (', bohr³', 2), 'tox21': ('', 3)}[data]
            metric = ('%%.%df' % digits).__mod__
            row = ['%s, %s%s' % (NAMES[data], of['metric'], unit), place]
            for name in (bench_chemprop.CHEMPROP, bench_chemprop.OURS):
                runs = [run for run in of['runs'] if run['contender'] == name]
                for key, shown in (('seconds', number), ('test', metric)):
                    ends = of_answers.between([run[key] for run in runs], shown)
                    row.append('%s (%s)' % (shown(of['median'][name][key]), ends))
            rows.append(row)
    return table(['', '', 'chemprop, s', 'test metric', 'ours, s', 'test metric'], rows)


def _of_two_lines(result):
    """Yield (data set, method, batch size or `PREDICT`, cell) of a result of bench_two_lines."""
    for data, of_methods in result['data'].items():
        for method, cells in of_methods.items():
            for n_batch, cell in cells.items():
                yield SHORT.get(data, data), method, n_batch, cell


# Name of a table -> function that makes it, and its arguments: names of results, and whether each
# is of a CPU.
TABLES = {
    'answers': (
        answers,
        [
            ('two_lines', False),
            ('two_lines', True),
            ('captured', False),
            ('command', False),
            ('scaling', False),
            ('jax', False),
            ('jax', True),
            ('chemprop', False),
            ('chemprop', True),
            ('widths', False),
        ],
    ),
    'two_lines': (two_lines, [('two_lines', False)]),
    'two_lines_predict': (two_lines_predict, [('two_lines', False)]),
    'two_lines_cpu': (two_lines, [('two_lines', True)]),
    'two_lines_predict_cpu': (two_lines_predict, [('two_lines', True)]),
    'captured': (captured, [('captured', False)]),
    'jax': (jax, [('jax', False)]),
    'jax_cpu': (jax_cpu, [('jax', True)]),
    'command': (command, [('command', False)]),
    'command_short': (command_short, [('command', False)]),
    'large': (large, [('large', False)]),
    'sell': (sell, [('sell', False)]),
    'network': (network, [('network', False)]),
    'methods': (methods, [('methods', False)]),
    'quality': (quality, [('quality', False)]),
    'chemprop': (chemprop, [('chemprop', True), ('chemprop', False)]),
    'scaling': (scaling, [('scaling', False)]),
    'widths': (widths, [('widths', False)]),
    'widths_jax': (widths_jax, [('widths', False)]),
    'widths_host': (widths_host, [('widths', False), ('widths_again', False)]),
    'widths_products': (widths_products, [('widths', False)]),
    'tf32_errors': (tf32_errors, [('tf32', False)]),
    'tf32_trainings': (tf32_trainings, [('tf32', False)]),
}


def page(text, results=RESULTS):
    """Replace the tables of a page; return its text, and names of tables without results."""
    missing = []

    def replaced(found):
        make, arguments = TABLES[found[2]]
        paths = [stored(name, on_cpu, results) for name, on_cpu in arguments]
        if not all(path.exists() for path in paths):
            missing.append(found[2])
            return found[0]
        lines = make(*(json.loads(path.read_text()) for path in paths))
        return found[1] + '\n'.join(lines) + '\n' + found[3]

    return BLOCK.sub(replaced, text), missing


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for path in PAGES:
        text, missing = page(path.read_text())
        path.write_text(text)
        print('wrote %s; not stored: %s' % (path, ', '.join(missing) or 'nothing'))


if __name__ == '__main__':
    main()
