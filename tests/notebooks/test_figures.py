"""Figures are the same bytes when they are made again, and their colours are told apart in grey."""

import re
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb

from notebooks.support import figures


@pytest.fixture(autouse=True)
def _out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))
    mpl.use("agg")


def _make(folder: Path) -> dict[str, bytes]:
    figures.use_style()
    figure, (axes,) = figures.panels(1)
    axes.plot([0, 1], [1, 2], color=figures.COLOURS["target"])
    axes.set(xlabel=r"$\alpha$", ylabel="tokens")
    figures.save(figure, "again")
    plt.close(figure)
    return {kind: (folder / "figures" / f"again.{kind}").read_bytes() for kind in ("svg", "pdf")}


def test_a_figure_is_the_same_bytes_when_made_again(tmp_path: Path) -> None:
    assert _make(tmp_path) == _make(tmp_path)


def test_identifiers_are_numbered_in_their_order_and_name_the_figure(tmp_path: Path) -> None:
    svg = _make(tmp_path)["svg"].decode()
    known, used = re.findall(r'id="(again-[0-9]+)"', svg), re.findall(r'(?:url\(#|href="#)(again-[0-9]+)', svg)
    assert known == [f"again-{number}" for number in range(1, len(known) + 1)]
    assert set(used) <= set(known)
    assert not re.search(r'["#][a-z][0-9a-f]{10}["\)]', svg)  # what Matplotlib calls them


def test_other_words_of_eleven_letters_stay() -> None:
    assert figures.stable(b'<g id="c0123456789">#fade0123456" c0123456789</g>', "a") == (
        b'<g id="a-1">#fade0123456" c0123456789</g>'
    )


def test_places_are_thousandths_of_a_point_and_scales_are_kept() -> None:
    near, drawn = (
        b'<use transform="translate(%s -3.0004) scale(0.015625 -0.07)"/>' % at for at in (b"1.234567", b"1.235")
    )
    assert figures.stable(near, "a") == drawn.replace(b"-3.0004", b"-3")
    assert figures.stable(near.replace(b"567", b"568"), "a") == figures.stable(near, "a")
    assert figures.stable(b"L 0.0004999 -0.0012 503.99951 2.125", "a") == b"L 0 -0.001 504 2.125"


def _luminance(colour: object) -> float:
    red, green, blue = to_rgb(colour)  # type: ignore[arg-type]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_ordered_families_darken_in_order() -> None:
    grey = [_luminance(colour[:3]) for colour in figures.family(6)]
    assert grey == sorted(grey)
    assert min(b - a for a, b in pairwise(grey)) > 0.05


def test_target_and_draft_differ_in_grey() -> None:
    for one, other in combinations(("target", "draft", "theory"), 2):
        assert abs(_luminance(figures.COLOURS[one]) - _luminance(figures.COLOURS[other])) > 0.1
