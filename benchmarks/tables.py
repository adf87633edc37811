"""Write the tables of docs/performance.md from the stored results.

``python -m benchmarks.tables`` replaces what stands between ``<!-- table: NAME -->`` and
``<!-- end -->``. A table whose results are not stored is left as it is, and named.
"""

import json
import re

from benchmarks import bench_command
from benchmarks.harness import number, RESULTS, ROOT, TITLES
from benchmarks.training import bench_screening
from benchmarks.training import bench_two_lines
from benchmarks.training.bench_captured import CAPTURED, EAGER, GEOMETRIC_CAPTURED, ON_DEVICE
from benchmarks.training.bench_captured import over_jax, ratio
from benchmarks.training.bench_methods import OVER_UPSTREAM, TARGETS
from benchmarks.training.step_contenders import DRIVERS, EAGER_PACKED, JAX, PACKED
from benchmarks.training.subjects import GEOMETRIC, UPSTREAM

PAGE = ROOT / 'docs' / 'performance.md'
BLOCK = re.compile(r'(<!-- table: (\w+) -->\n).*?(<!-- end -->)', re.DOTALL)

NAMES = {'tox21': 'Tox21', 'qm9': 'QM9'}
SETS = {
    'tox21': 'Tox21, mean ROC-AUC',
    'qm9 alpha': 'QM9 alpha, MAE in bohr³',
    'qm9 gap': 'QM9 gap, MAE in hartree',
    'all qm9 alpha': 'all of QM9, alpha',
}
DIGITS = {'tox21': 3, 'qm9 alpha': 2, 'qm9 gap': 4, 'all qm9 alpha': 2}
ARMS = ('dense', 'folded', 'folded to the largest', 'packed')


def table(head, rows):
    """Return lines of a table; a cell that is None becomes a dash."""
    cells = [head, ['---'] * len(head), *rows]
    return ['| %s |' % ' | '.join('-' if cell is None else cell for cell in row) for row in cells]


def over(one, other):
    """Return one value over another; None where one is missing."""
    return None if one is None or other is None else one / other


def training_cpu(result):
    """Training steps on the CPU, batch 128 of Tox21."""
    rows = []
    for method, of in result['data']['tox21']['methods'].items():
        cell = of['batches']['128']
        times = {
            name: {kind: found[kind]['with converter']['median'] for kind in found}
            for name, found in cell['milliseconds'].items()
        }
        steps = {name: found['training'] for name, found in times.items()}
        nodes = {name: sum(counts.values()) for name, counts in of['nodes a step'].items()}
        peak = {name: number(n_bytes / 1e6) for name, n_bytes in cell['peak_bytes'].items()}
        dense, folded = 'upstream dense', 'ours folded'
        rows.append(
            [
                TITLES[method],
                number(steps[dense]),
                number(steps[folded]),
                *(
                    '%.1f' % (steps[dense] / steps['ours ' + layout])
                    for layout in ('folded', 'packed', 'padded')
                ),
                '%.1f' % (times[dense]['inference'] / times[folded]['inference']),
                '%s -> %s' % (peak[dense], peak[folded]),
                '%d -> %d' % (nodes[dense], nodes[folded]),
            ]
        )
    return table(
        ['batch 128', 'upstream, ms', 'folded, ms', 'ratio', 'packed, ratio', 'padded, ratio']
        + ['prediction, folded', 'peak, MB', 'nodes of the graph'],
        rows,
    )


def captured(result):
    """Captured steps of the five models, batch 128 of Tox21."""
    rows = []
    methods = result['data']['tox21']['methods']
    heads = {
        UPSTREAM: 'upstream dense',
        EAGER: 'ours, eager',
        CAPTURED: 'ours, captured',
        ON_DEVICE: 'captured, `DeviceDataset`',
        PACKED: 'the same, packed',
        GEOMETRIC: 'PyG',
        GEOMETRIC_CAPTURED: 'PyG captured',
    }
    is_folded = any(PACKED in of['batches']['128']['milliseconds'] for of in methods.values())
    if not is_folded:  # from before there were folded batches
        del heads[PACKED]
    for method, of in methods.items():
        times = {n_batch: cell['milliseconds'] for n_batch, cell in of['batches'].items()}
        walls = {
            n_batch: {name: found['wall']['median'] for name, found in cell.items()}
            for n_batch, cell in times.items()
        }
        faster = {n: '%.0f' % over(wall[UPSTREAM], wall[ON_DEVICE]) for n, wall in walls.items()}
        rows.append(
            [
                TITLES[method],
                *(number(walls['128'].get(name)) for name in heads),
                faster['128'],
                '%.0f %%' % (100 * times['128'][ON_DEVICE]['busy']),
                faster.get('32'),
                faster.get('1024'),
            ]
        )
    lines = table(['', *heads.values(), 'faster', 'GPU busy', 'batch 32', '1,024'], rows)
    return [
        *lines,
        '',
        'Ours is folded, except where packed is named.' if is_folded else 'Ours is packed.',
    ]


def jax(result):
    """Captured steps beside JAX's; the ratios are those of its faster one and ours, packed."""
    heads = {
        PACKED: 'ours, packed',
        ON_DEVICE: 'folded',
        CAPTURED: 'from `SparseDataset`',
        **{JAX[key]: 'JAX %s, %s' % key for key in JAX},
    }
    rows = []
    for title, cell in _cells(result):
        times = cell['milliseconds']
        ratios = [over_jax(cell, precision) for precision in ('FP32', 'TF32')]
        rows.append(
            [
                title,
                *_medians(times, heads, '%.3f'),
                *map(_ratio, ratios),
                '%.0f %%' % (100 * times[PACKED]['busy']) if PACKED in times else None,
            ]
        )
    head = ['ms a step', *heads.values(), 'FP32: JAX over ours', 'TF32', 'GPU busy']
    lines = table(head, rows)
    return ['![Milliseconds a captured step beside JAX](jax.png)', '', *lines]


def jax_cpu(result):
    """Eager steps beside JAX's, on a CPU; the ratios are JAX's time over ours, packed."""
    drivers = [(JAX[driver, 'FP32'], driver) for driver in DRIVERS]
    heads = {EAGER_PACKED: 'ours, packed', EAGER: 'folded'}
    heads.update((name, 'JAX ' + driver) for name, driver in drivers)
    rows = [
        [
            title,
            *_medians(cell['milliseconds'], heads, '%.1f'),
            *(_ratio(ratio(cell, EAGER_PACKED, name)) for name, _ in drivers),
        ]
        for title, cell in _cells(result)
    ]
    return table(['ms a step', *heads.values(), *('%s over ours' % of for _, of in drivers)], rows)


def _cells(result):
    """Yield title and results of each method, data set and batch of bench_captured."""
    for data, of_data in result['data'].items():
        for method, of in of_data['methods'].items():
            for n_batch, cell in sorted(of['batches'].items(), key=lambda item: int(item[0])):
                batch = '{:,}'.format(int(n_batch))
                yield '%s, %s, %s' % (NAMES[data], TITLES[method], batch), cell


def _ratio(found):
    return None if found is None else '%.2f' % found


def _medians(times, names, form):
    return [form % times[name]['wall']['median'] if name in times else None for name in names]


def floors(result):
    """Kernels and device time of captured steps beside what they must take."""
    rows = []
    for data, of_data in result['data'].items():
        for method, of in of_data['methods'].items():
            for n_batch, layouts_ in of['batches'].items():
                cell = layouts_['packed']
                rows.append(
                    [
                        '%s, %s, %s' % (NAMES[data], TITLES[method], '{:,}'.format(int(n_batch))),
                        *('%.0f' % cell[name] for name in ('kernels', 'device_us', 'kernels_us')),
                        *(
                            '%.1f' % cell[name]
                            for name in ('bytes_us', 'flops_us', 'launches_us', 'floor_us')
                        ),
                    ]
                )
    head = ['us of the device', 'kernels', 'measured', 'in kernels', 'bytes', 'flops', 'launches']
    return table([*head, 'floor'], rows)


def command(result):
    """Seconds from the start of a command to the saved model."""
    rows = []
    for data, of_data in result['data'].items():
        for method, of in of_data['methods'].items():
            row = ['%s, %s' % (NAMES[data], TITLES[method])]
            for kind in (bench_command.WARM, bench_command.COLD):
                for name in bench_command.OPTIONS:
                    row.append(_seconds(of.get(name, {}), kind))
                ratio = over(
                    *(
                        of.get(name, {}).get(kind, {}).get('seconds')
                        for name in (bench_command.UPSTREAM, bench_command.CAPTURED)
                    )
                )
                row.append(ratio and number(ratio))
            rows.append(row)
    head = [*bench_command.OPTIONS, 'faster']
    lines = table(['seconds', *head, 'empty caches: ' + head[0], *head[1:]], rows)
    picture = ['![Seconds from the command to the model](command.png)', '']
    return [*picture, *lines, '', '*: of an earlier commit. About: extrapolated from fewer epochs.']


def _seconds(of, kind):
    """Return how long runs of a contender took, with what is to be known about them."""
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
            cusparse = {name: time for name, time in times.items() if 'cuSPARSE' in name}
            rows.append(
                [
                    case['name'],
                    str(point['n_B']),
                    '%.0f' % times['auto'],
                    '%.2f' % (cusparse['cuSPARSE csr alg3'] / times['auto']),
                    '%.2f' % (min(cusparse.values()) / times['auto']),
                ]
            )
    than = "times faster than cuSPARSE's deterministic algorithm", "... than cuSPARSE's fastest"
    head = ['matrix', 'n_B', 'ours, us', *than]
    return table(head, rows)


def network(result):
    """A captured step on one large graph beside upstream's and PyTorch Geometric's."""
    rows = []
    for name, of in result['networks'].items():
        size, times = of['size'], of['milliseconds']
        size = '{nodes:,} nodes, {citations:,} undirected edges'.format(**size)
        row = [f'{name}: {size}']
        row += [number(time['median']) for time in times.values()]
        rows.append(row)
    return table(['milliseconds', *times], rows)


def layouts(result):
    """Captured steps folded and packed; the ratio with its 10th and 90th percentile."""
    methods = result['data']['tox21']['methods']
    batches = sorted({key for of in methods.values() for key in of['batches']}, key=int)
    rows = []
    for method, of in methods.items():
        row = [TITLES[method]]
        for n_batch in batches:
            cell = of['batches'].get(n_batch)
            if cell is None:
                row += [None] * 3
                continue
            ratio = cell['folded over packed']
            row += ['%.3f' % cell[layout]['median'] for layout in ('folded', 'packed')]
            row.append('%(median).2f (%(low).2f to %(high).2f)' % ratio)
        rows.append(row)
    head = ['']
    for n_batch in batches:
        head += ['batch {:,}: folded'.format(int(n_batch)), 'packed', 'ratio']
    return table(head, rows)


def methods(result):
    """A captured step of every method beside upstream's."""
    rows = []
    for method, of in result['methods'].items():
        row = ['`%s`' % method] + [None] * 6
        for n_batch, cell in of.get('batches', {}).items():
            if 'not_run' in cell:
                continue
            (_, upstream), (name, ours) = cell['milliseconds'].items()
            least = ', at least %d' % OVER_UPSTREAM if method in TARGETS else ''
            row[1:] = [
                n_batch,
                '`DeviceDataset`' if name == ON_DEVICE else 'dense examples',
                number(upstream['wall']['median']),
                number(ours['wall']['median']),
                '%.3g%s' % (cell['over upstream'], least),
                '%.0f %%' % (100 * ours['busy']) if 'busy' in ours else None,
            ]
        rows.append(row)
    return table(
        ['method', 'batch', 'data', 'upstream dense, ms', 'ours captured, ms', 'faster']
        + ['GPU busy'],
        rows,
    )


def screening(result):
    """Molecules a second, from data sets and from SMILES, beside what the cores can parse."""
    rows = []
    for data, of_data in result['data'].items():
        for method, of in of_data['methods'].items():
            rates = {
                what: {name: found['median'] for name, found in several.items()}
                for what, several in of['molecules a second'].items()
            }
            plain, parsed = rates['without parsing'], rates['with parsing']
            cost = of['microseconds of a core to parse a molecule']
            cores = {
                where: 1e6 * result['n_cores'] / cost['from_smiles' + where]['low']
                for where in (bench_screening.ALONE, bench_screening.ALL_CORES)
            }
            seen = [
                plain[UPSTREAM],
                plain[bench_screening.CAPTURED + bench_screening.STEADY],
                plain[bench_screening.ON_DEVICE + bench_screening.STEADY],
                parsed[UPSTREAM],
                parsed[bench_screening.CAPTURED + bench_screening.STEADY],
                cores[bench_screening.ALL_CORES],
                cores[bench_screening.ALONE],
            ]
            digits = [round(rate, 3 - len(str(int(rate)))) for rate in seen]
            title = '%s, %s' % (NAMES[data], TITLES[method])
            rows.append([title, *map('{:,.0f}'.format, digits)])
    head = ['molecules a second', 'upstream', 'ours, `SparseDataset`', '`DeviceDataset`']
    head += ['from SMILES: upstream', 'ours', '%d cores parsing' % result['n_cores']]
    return table([*head, 'one core alone, times %d' % result['n_cores']], rows)


def quality(result):
    """Test metrics: mean and standard deviation over the seeds."""
    rows = []
    for data, title in SETS.items():
        for method, arms in result['summary'].get(data, {}).items():
            row = ['%s, %s' % (TITLES[method], title)]
            for arm in ARMS:
                found = arms.get(arm)
                cell = None if found is None else '%.*f' % (DIGITS[data], found['mean'])
                if found is not None and found['standard deviation'] is not None:
                    cell += ' ± %.*f' % (DIGITS[data], found['standard deviation'])
                row.append(cell)
            rows.append(row)
    return table(['', 'upstream dense', 'folded', 'folded to the largest', 'packed'], rows)


def two_lines(result):
    """Epochs with validation of upstream's scripts, with the two lines and with more lines."""
    rows, has_more = [], False
    names = bench_two_lines.UPSTREAM, bench_two_lines.TWO_LINES, bench_two_lines.MORE_LINES
    for data, of_methods in result['data'].items():
        for method, of_batches in of_methods.items():
            for n_batch, cell in of_batches.items():
                if n_batch == bench_two_lines.PREDICT:
                    continue
                epochs = cell['seconds an epoch']
                times = [1e3 * epochs[name]['median'] for name in names if name in epochs]
                has_more = len(times) == 3
                where = '%s, %s, batch %s' % (data, TITLES[method], n_batch)
                rows.append([where, *map(number, times), '%.1f' % (times[0] / times[1])])
    head = ['ms an epoch', 'upstream', 'two lines']
    more = ['GraphUpdater and DeviceDataset'] * has_more
    return table([*head, *more, 'two lines faster than upstream'], rows)


def two_lines_predict(result):
    """`predict` of upstream's models, of dense examples and of a SparseDataset."""
    rows = []
    names = bench_two_lines.UPSTREAM, bench_two_lines.TWO_LINES, bench_two_lines.SPARSE
    for data, of_methods in result['data'].items():
        for method, cells in of_methods.items():
            found = cells[bench_two_lines.PREDICT]
            upstream, *times = [found['seconds'][name] for name in names]
            rows.append(
                [
                    '%s, %s, %s molecules'
                    % (data, TITLES[method], '{:,}'.format(found['molecules'])),
                    number(upstream),
                    *('%s (%.1f)' % (number(time), upstream / time) for time in times),
                ]
            )
    head = ['s (times faster)', 'upstream', 'two lines, dense examples', 'two lines, SparseDataset']
    return table(head, rows)


TABLES = {
    'two_lines': (two_lines, 'nvidia-h200/two_lines.json'),
    'two_lines_predict': (two_lines_predict, 'nvidia-h200/two_lines.json'),
    'two_lines_cpu': (two_lines, 'cpu/two_lines.json'),
    'two_lines_predict_cpu': (two_lines_predict, 'cpu/two_lines.json'),
    'training_cpu': (training_cpu, 'cpu/training.json'),
    'captured': (captured, 'nvidia-h200/captured.json'),
    'jax': (jax, 'nvidia-h200/jax.json'),
    'jax_cpu': (jax_cpu, 'cpu/jax.json'),
    'floors': (floors, 'nvidia-h200/floors.json'),
    'command': (command, 'nvidia-h200/command.json'),
    'large': (large, 'nvidia-h200/large.json'),
    'network': (network, 'nvidia-h200/network.json'),
    'layouts': (layouts, 'nvidia-h200/layouts.json'),
    'methods': (methods, 'nvidia-h200/methods.json'),
    'screening': (screening, 'nvidia-h200/screening.json'),
    'quality': (quality, 'nvidia-h200/quality.json'),
}


def page(text, folder=RESULTS):
    """Return a page with its tables replaced, and the names of those without results."""
    missing = []

    def replaced(found):
        make, name = TABLES[found[2]]
        path = folder / name
        if not path.exists():
            missing.append(name)
            return found[0]
        return found[1] + '\n'.join(make(json.loads(path.read_text()))) + '\n' + found[3]

    return BLOCK.sub(replaced, text), missing


def main():
    text, missing = page(PAGE.read_text())
    PAGE.write_text(text)
    print('wrote %s; not stored: %s' % (PAGE, ', '.join(missing) or 'nothing'))


if __name__ == '__main__':
    main()
