"""Answers at the top of docs/performance.md, and the ranges of ratios that pages quote."""

from benchmarks import bench_command
from benchmarks.harness import NAMES, number
from benchmarks.training import bench_chemprop, bench_two_lines, bench_widths
from benchmarks.training.step_contenders import DRIVERS, EAGER, EAGER_PACKED, JAX, over_jax
from benchmarks.training.step_contenders import PACKED, PRECISIONS, ratio, UPSTREAM

SMALL_SAMPLE = "QM9's sample"


def between(values, ends=number):
    """Return the text '3 to 5' for the least and the largest value."""
    low, high = ends(min(values)), ends(max(values))
    return low if low == high else '%s to %s' % (low, high)


def epochs(two_lines, data=''):
    """Return upstream's seconds an epoch over those of the two lines, for all cells.

    `data`: beginning of the name of a data set, to have its cells only.
    """
    found = []
    for cells in _methods(two_lines, data):
        for n_batch, cell in cells.items():
            if n_batch != bench_two_lines.PREDICT:
                seconds = cell['seconds an epoch']
                upstream, ours = bench_two_lines.UPSTREAM, bench_two_lines.TWO_LINES
                found.append(seconds[upstream]['median'] / seconds[ours]['median'])
    return found


def predictions(two_lines, name=bench_two_lines.TWO_LINES, data=''):
    """Return upstream's seconds of `predict` over those of a contender, for all cells."""
    found = []
    for cells in _methods(two_lines, data):
        seconds = cells[bench_two_lines.PREDICT]['seconds']
        found.append(seconds[bench_two_lines.UPSTREAM] / seconds[name])
    return found


def _methods(two_lines, data):
    """Yield the cells of every method of the data sets whose names begin with `data`."""
    for name, methods in two_lines['data'].items():
        if name.startswith(data):
            yield from methods.values()


def steps(result, measure, batches=None):
    """Return `measure` of every cell of a result of bench_steps, if it is not None.

    `batches`: names of the batches whose cells are taken; None takes all.
    """
    cells = [
        cell
        for of_data in result['data'].values()
        for of in of_data['methods'].values()
        for n_batch, cell in of['batches'].items()
        if batches is None or n_batch in batches
    ]
    return [found for found in map(measure, cells) if found is not None]


def eager_over_upstream(cell):
    return ratio(cell, EAGER, UPSTREAM)


def over_jax_in_fp32(cell):
    return over_jax(cell, 'FP32')


def over_jax_in_tf32(cell):
    return over_jax(cell, 'TF32')


def over_jax_on_cpu(cell):
    ratios = [ratio(cell, EAGER_PACKED, JAX[driver, 'FP32']) for driver in DRIVERS]
    return None if None in ratios else min(ratios)


def _milliseconds(widths, name):
    """Return the milliseconds of a step of 128 molecules of Tox21 at 64 units, of all methods."""
    cells = [of['batches']['128'] for of in widths['data']['64'].values()]
    return [cell['milliseconds'][name]['wall']['median'] for cell in cells]


def _seconds(command, data, name, kind):
    """Return the seconds of a contender's commands as text, with 'about' if extrapolated."""
    runs = [of[name][kind] for of in command['data'][data]['methods'].values()]
    about = 'about ' * any(run['is_extrapolated'] for run in runs)
    return about + between([run['seconds'] for run in runs])


def _commands(command, kind):
    parts = [
        '%s %s s instead of %s'
        % (
            NAMES[data],
            _seconds(command, data, bench_command.CAPTURED, kind),
            _seconds(command, data, bench_command.UPSTREAM, kind),
        )
        for data in command['data']
    ]
    return ', '.join(parts)


def _several_gpus(scaling):
    """Return '2 GPUs has 0.93 to 0.98', and so on for all numbers of GPUs that were measured."""
    shares = {}
    for of in scaling['summary'].values():
        for weak in of['weak'].values():
            for n, share in weak.items():
                if 'measured' in share:
                    shares.setdefault(int(n), []).append(share['measured'])
    shares = sorted(shares.items())
    return ', of '.join('%d GPUs has %s' % (n, between(found)) for n, found in shares)


def _over_chemprop(chemprop):
    names = bench_chemprop.CHEMPROP, bench_chemprop.OURS
    medians = [of['median'] for of in chemprop['data'].values()]
    return between([of[names[0]]['seconds'] / of[names[1]]['seconds'] for of in medians])


def wide_layers(widths):
    """Return the answer about wide layers from a result of bench_widths."""
    over_upstream = {precision: [] for precision in PRECISIONS}
    beside_jax = {precision: [] for precision in PRECISIONS}
    for (units, _, n_batch), cell in bench_widths.cells(widths['data']):
        for precision in PRECISIONS:
            ours = bench_widths.OURS[precision]
            beside_jax[precision].append(over_jax(cell, precision, ours))
            if (units, n_batch) == ('256', '128'):
                upstream = bench_widths.UPSTREAM_S[precision]
                over_upstream[precision].append(ratio(cell, ours, upstream))
    texts = {
        name: [between([value for value in of[p] if value is not None]) for p in PRECISIONS]
        for name, of in (('upstream', over_upstream), ('jax', beside_jax))
    }
    units = between([int(units) for units in widths['data']], str)
    return (
        "At 256 units a step of 128 molecules is %s times as fast as upstream's in FP32 and %s in "
        'TF32. At %s units JAX takes %s times as long as ours in FP32 and %s in TF32: [wide '
        'layers](#wide-layers)' % (*texts['upstream'], units, *texts['jax'])
    )


def answers(
    two_lines,
    two_lines_cpu,
    captured,
    command,
    scaling,
    jax,
    jax_cpu,
    chemprop_gpu,
    chemprop_cpu,
    widths,
):
    """Return question -> answer, with a link to its section; arguments are stored results."""
    ours, dense = (_milliseconds(widths, name) for name in (PACKED, UPSTREAM))
    faster = {
        'epochs': between(epochs(two_lines)),
        'epochs on a CPU': between(epochs(two_lines_cpu)),
        'epochs of little padding': between(epochs(two_lines_cpu, SMALL_SAMPLE)),
        'predict': between(predictions(two_lines)),
        'predict, sparse': between(predictions(two_lines, bench_two_lines.SPARSE)),
        'predict on a CPU': between(predictions(two_lines_cpu)),
        'steps': between([before / after for before, after in zip(dense, ours)]),
        'eager': between(steps(captured, eager_over_upstream, ['32', '128'])),
        'FP32': between(steps(jax, over_jax_in_fp32)),
        'TF32': between(steps(jax, over_jax_in_tf32)),
        'large on a CPU': between(steps(jax_cpu, over_jax_on_cpu, ['1024'])),
        'small on a CPU': between(steps(jax_cpu, over_jax_on_cpu, ['32', '128'])),
    }
    return {
        'How much faster is an epoch?': (
            "{epochs} times as fast as before in upstream's `run_train` on a GPU, validation "
            'included: [the two lines](#the-two-lines)'
        ).format(**faster),
        'A training step?': (
            "%s ms for 128 molecules of Tox21, packed, where upstream's dense models take %s: "
            '{steps} times as fast: [wide layers](#wide-layers). The same networks in JAX take '
            '{FP32} times as long as ours in FP32, and {TF32} times in TF32: [beside '
            'JAX](#beside-jax)' % (between(ours), between(dense))
        ).format(**faster),
        'With wide layers?': wide_layers(widths),
        'Prediction?': (
            '{predict} times as fast on a GPU from dense examples, whose conversion takes most of '
            'the time; {predict, sparse} times from a `SparseDataset`: [predict](#predict)'
        ).format(**faster),
        'The whole command?': (
            'To the model after 20 epochs: %s: [the whole command](#the-whole-command)'
            % _commands(command, bench_command.WARM)
        ),
        'The first time, when kernels are compiled and molecules parsed?': (
            '%s: [the whole command](#the-whole-command)' % _commands(command, bench_command.COLD)
        ),
        'Several GPUs?': (
            'With a batch of its own, each of %s of the speed of a single one: [several '
            'GPUs](several_gpus.md#how-it-scales)' % _several_gpus(scaling)
        ),
        'On a CPU?': (
            'An epoch is {epochs on a CPU} times as fast on one thread, the least where little is '
            'padded ({epochs of little padding} on {name}): [on a CPU](#on-a-cpu)'
        ).format(name=SMALL_SAMPLE, **faster),
        "Beside chemprop's command?": (
            'Ours reaches its test result %s times as fast on a CPU and %s times on a GPU, with a '
            'metric that is as good or better: [chemprop](#beside-chemprop)'
            % (_over_chemprop(chemprop_cpu), _over_chemprop(chemprop_gpu))
        ),
        'Where does it gain little, or lose?': (
            'Eager steps of up to 128 molecules on a GPU are {eager} times as fast as '
            "upstream's; `predict` on a CPU {predict on a CPU} times. Steps on a CPU beside JAX: "
            '{large on a CPU} times at 1,024 molecules, {small on a CPU} at 32 and 128: [on a '
            'CPU](#on-a-cpu). Some products are [faster elsewhere]'
            '(products.md#where-others-are-faster)'
        ).format(**faster),
        'Do the models learn as well?': (
            "With upstream's padding they learn as well as upstream's models do; padded to the "
            'largest molecule, as well or better: [how well they learn](learning.md)'
        ),
    }
