"""Figures are drawn from the stored results; the text beneath them is not clipped."""

from matplotlib import pyplot
import pytest

from benchmarks import plot


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, 'FOLDER', tmp_path)
    return tmp_path


@pytest.mark.parametrize('name', ['scaling', pytest.param(None, marks=pytest.mark.slow)])
def test_figures_are_drawn(folder, monkeypatch, name):
    close = pyplot.close

    def check(figure):
        renderer = figure.canvas.get_renderer()
        beneath = figure._supxlabel.get_window_extent(renderer)
        assert 0 <= beneath.x0 and beneath.x1 <= figure.bbox.width
        close(figure)

    monkeypatch.setattr(plot.pyplot, 'close', check)
    plot.main([name] if name else [])
    assert all(plot.stored(drawn).exists() for drawn in plot.DRAWN)
    names = {name} if name else {*plot.DRAWN, 'figures_tables'}
    assert {path.stem for path in folder.glob('*.png')} == names


def summary(median):
    return {'median': median, 'low': 0.9 * median, 'high': 1.1 * median}


CONDITIONS = {'cpu': 'a CPU', 'numpy': '2', 'python': '3', 'commit': 'c', 'date': 'd'}


@pytest.mark.parametrize('drawn', ['jax', 'command'])
def test_results_that_are_partly_missing(folder, drawn):
    names = list(plot.JAX)
    steps = {name: {'wall': summary(0.1)} for name in names}
    of_rsgcn = {names[-1]: {'wall': summary(0.2)}}
    methods = {'gin': steps, 'rsgcn': of_rsgcn}
    methods = {of: {'batches': {'32': {'milliseconds': ms}}} for of, ms in methods.items()}
    if drawn == 'command':
        runs = {'runs': [{'seconds': 10.0}, {'seconds': 12.0}]}
        captured = {'warm': runs, 'cold': runs}
        upstream = {'warm': runs}
        rsgcn = {'ours captured': {}}
        relgcn = {'upstream dense': upstream, 'ours captured': captured}
        methods = {'relgcn': relgcn, 'rsgcn': rsgcn}
    data = {'qm9': {'description': 'QM9', 'methods': methods}}
    plot.DRAWN[drawn]({'method': 'how', 'conditions': CONDITIONS, 'data': data})
    assert (folder / (drawn + '.png')).stat().st_size > 1000
