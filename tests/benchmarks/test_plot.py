"""Figures are drawn from the stored results; the text beneath them is not clipped."""

from matplotlib import pyplot
import pytest

from benchmarks import plot


@pytest.mark.parametrize('name', ['jax', pytest.param(None, marks=pytest.mark.slow)])
def test_figures_are_drawn(tmp_path, monkeypatch, name):
    monkeypatch.setattr(plot, 'FOLDER', tmp_path)
    close = pyplot.close

    def check(figure):
        renderer = figure.canvas.get_renderer()
        beneath = figure._supxlabel.get_window_extent(renderer)
        assert 0 <= beneath.x0 and beneath.x1 <= figure.bbox.width
        close(figure)

    monkeypatch.setattr(plot.pyplot, 'close', check)
    plot.main([name] if name else [])
    stored = {
        drawn
        for drawn, (_, places) in plot.DRAWN.items()
        if all((plot.RESULTS / place / (drawn + '.json')).exists() for place in places)
    }
    names = {name} if name else {*stored, 'figures_tables', 'speed'}
    assert {path.stem for path in tmp_path.glob('*.png')} == names


def summary(median):
    return {'median': median, 'low': 0.9 * median, 'high': 1.1 * median}


CONDITIONS = {
    'cpu': 'a CPU',
    'threads': '1',
    'numpy': '2',
    'python': '3',
    'commit': 'c',
    'date': 'd',
}


@pytest.mark.parametrize('drawn', ['jax', 'command'])
def test_results_that_are_partly_missing(tmp_path, monkeypatch, drawn):
    monkeypatch.setattr(plot, 'FOLDER', tmp_path)
    names = list(plot.JAX_COLORS)
    methods = {
        'gin': {
            'batches': {'32': {'milliseconds': {name: {'wall': summary(0.1)} for name in names}}}
        },
        'rsgcn': {'batches': {'32': {'milliseconds': {names[-1]: {'wall': summary(0.2)}}}}},
    }
    if drawn == 'command':
        runs = {'runs': [{'seconds': 10.0}, {'seconds': 12.0}]}
        methods = {
            'relgcn': {
                'upstream dense': {'warm': runs},
                'ours captured': {'warm': runs, 'cold': runs},
            },
            'rsgcn': {'ours captured': {}},
        }
    data = {'qm9': {'description': 'QM9', 'methods': methods}}
    getattr(plot, drawn)({'method': 'how', 'conditions': CONDITIONS, 'data': data})
    assert (tmp_path / (drawn + '.png')).stat().st_size > 1000
