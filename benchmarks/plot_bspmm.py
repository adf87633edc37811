"""Draw docs/bspmm.png from the stored result of bench_bspmm (no GPU needed).

``python -m benchmarks.plot_bspmm benchmarks/results/nvidia-h200/bspmm.json``
"""
import json
import pathlib
import sys

import matplotlib
matplotlib.use('Agg')
from matplotlib import pyplot  # NOQA: E402

LABELS = {'copy': 'device copy', 'bspmm': 'bspmm (ours)', 'cublas tf32': 'cuBLAS batched, TF32',
          'cublas fp32': 'cuBLAS batched, FP32', 'F.sparse_matmul': 'Chainer F.sparse_matmul'}
COLORS = {'copy': '0.75', 'bspmm': 'C3', 'cublas tf32': 'C0', 'cublas fp32': 'C9',
          'F.sparse_matmul': 'C2'}


def main(source):
    result = json.loads(pathlib.Path(source).read_text())
    figure, panels = pyplot.subplots(1, len(result['cases']), figsize=(11, 2.9))
    for panel, case in zip(panels, result['cases']):
        times = [case['device_us'][name]['median'] for name in LABELS]
        bars = panel.barh([LABELS[name] for name in LABELS], times,
                          color=[COLORS[name] for name in LABELS])
        panel.bar_label(bars, ['%.1f' % value for value in times], padding=3, fontsize=8)
        panel.set_xlim(0, max(times) * 1.2)
        panel.invert_yaxis()
        panel.set_title('batch %(batch)d, %(dim)d x %(dim)d, %(nnz_per_row)d a row, n_B = %(n_B)d'
                        % case, fontsize=9)
        panel.set_xlabel('device microseconds a call')
        panel.spines[['top', 'right']].set_visible(False)
        if panel is not panels[0]:
            panel.set_yticklabels([])
    figure.tight_layout()
    target = pathlib.Path(__file__).parent.parent / 'docs' / 'bspmm.png'
    figure.savefig(target, dpi=150)
    print('wrote', target)


if __name__ == '__main__':
    main(sys.argv[1])
