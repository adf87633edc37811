"""Figures are drawn from the stored results; the text beneath them is not clipped."""

from matplotlib import pyplot
import pytest

from benchmarks import plot


@pytest.mark.parametrize('name', ['host', pytest.param(None, marks=pytest.mark.slow)])
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
    names = {name} if name else {*plot.DRAWN, 'figures_tables'}
    assert {path.stem for path in tmp_path.glob('*.png')} == names
