"""Figures are drawn from stored results, and their legends and captions are not clipped."""

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
        for text in (figure._supxlabel, *figure.legends):
            box = text.get_window_extent(renderer)
            assert 0 <= box.x0 and box.x1 <= figure.bbox.width
        close(figure)

    monkeypatch.setattr(plot.pyplot, 'close', check)
    plot.main([name] if name else [])
    names = {name} if name else {*plot.DRAWN, 'figures_tables'}
    assert {path.stem for path in folder.glob('*.png')} == names


@pytest.mark.parametrize('name', plot.DRAWN)
def test_the_result_of_a_figure_is_stored(name):
    assert plot.stored(name).exists()


def summary(median):
    return {'median': median, 'low': 0.9 * median, 'high': 1.1 * median}


CONDITIONS = {'cpu': 'a CPU', 'numpy': '2', 'python': '3', 'commit': 'c', 'date': 'd'}


def assert_drawn(name, methods, folder):
    data = {'qm9': {'description': 'QM9', 'methods': methods}}
    plot.DRAWN[name]({'method': 'how', 'conditions': CONDITIONS, 'data': data})
    assert (folder / (name + '.png')).stat().st_size > 1000


def test_steps_that_are_partly_missing(folder):
    *others, last = plot.JAX
    whole = {name: {'wall': summary(0.1)} for name in (*others, last)}
    methods = {
        'gin': {'batches': {'32': {'milliseconds': whole}}},
        'rsgcn': {'batches': {'32': {'milliseconds': {last: {'wall': summary(0.2)}}}}},
    }
    assert_drawn('jax', methods, folder)


def test_steps_of_some_widths(folder):
    times = {name: {'wall': summary(0.1)} for name in plot.BY_WIDTH}
    methods = {'gin': {'batches': {'128': {'milliseconds': times}}}, 'nfp': {'batches': {}}}
    data = dict.fromkeys(plot.WIDTHS, methods)
    plot.widths({'conditions': CONDITIONS, 'data': data})
    assert (folder / 'widths.png').stat().st_size > 1000


def test_commands_that_are_partly_missing(folder):
    runs = {'runs': [{'seconds': 10.0}, {'seconds': 12.0}], 'is_extrapolated': True}
    methods = {
        'relgcn': {'upstream dense': {'warm': runs}, 'ours captured': {'warm': runs, 'cold': runs}},
        'rsgcn': {'ours captured': {}},
    }
    assert_drawn('command', methods, folder)
