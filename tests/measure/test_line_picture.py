"""The picture of lines: everything is there, in its place, and readable by a browser."""

from xml.etree import ElementTree

import pytest

from jaxbench.measure import line_picture
from jaxbench.measure.line_picture import Axis, Line, Panel, Point

SVG = "{http://www.w3.org/2000/svg}"
ACROSS = Axis("tokens", {1: "1", 10: "10", 100: "100"}, is_log=True)
UP = Axis("share", {0: "0", 1: "1"})


def drawn(*lines, x=ACROSS, y=UP):
    return ElementTree.fromstring(line_picture.draw("a & b", "two < three", [Panel("first", x, y, lines)]))


def points_of(root):
    return [
        tuple(map(float, pair.split(",")))
        for line in root.iter(f"{SVG}polyline")
        for pair in line.get("points").split()
    ]


def test_points_lie_between_the_outer_ticks_by_their_axis():
    places = points_of(drawn(Line("arm", "#123456", [Point(1, 0.0), Point(10, 0.5), Point(100, 1.0)])))
    (left, low), middle, (right, high) = places
    assert middle == pytest.approx(((left + right) / 2, (low + high) / 2), abs=0.06), "10 is halfway from 1 to 100"
    assert left < right and low > high, "more is to the right, and up"


def test_a_single_tick_stands_in_the_middle():
    ((place, _),) = points_of(drawn(Line("arm", "#123456", [Point(5, 0.0)]), x=Axis("tokens", {5: "5"}, is_log=True)))
    (_, _), (middle, _), (_, _) = points_of(drawn(Line("arm", "#123456", [Point(x, 0.0) for x in (1, 10, 100)])))
    assert place == pytest.approx(middle, abs=0.06)


def test_what_lies_outside_is_drawn_at_the_edge():
    inside, outside = points_of(drawn(Line("arm", "#123456", [Point(100, 1.0), Point(1000, 7.0)])))
    assert inside == outside
    lowest, negative = points_of(drawn(Line("arm", "#123456", [Point(1, 0.0), Point(-5, 0.0)])))
    assert lowest == negative, "a logarithmic axis has no place left of its first tick"


def test_words_are_escaped_and_a_name_stands_once():
    lines = (Line("arm", "#123456", [Point(1, 0.0)]), Line("arm", "#123456", [Point(1, 1.0)], is_dashed=True))
    root = drawn(*lines)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a & b", "two < three", "first", "tokens", "10"} <= set(words) and words.count("arm") == 1
    assert [line.get("stroke-dasharray") for line in root.iter(f"{SVG}polyline")] == [None, "5 4"]


def test_an_interval_is_a_line_from_its_low_to_its_high_end():
    root = drawn(Line("arm", "#123456", [Point(10, 0.5, 0.0, 1.0), Point(100, 0.5)]))
    bars = [line for line in root.iter(f"{SVG}line") if line.get("stroke") == "#123456" and line.get("stroke-opacity")]
    grid = [float(line.get("y1")) for line in root.iter(f"{SVG}line") if line.get("class") == "grid"]
    assert [(float(bar.get("y1")), float(bar.get("y2"))) for bar in bars] == [(max(grid), min(grid))]


def test_powers_enclose_the_values():
    assert line_picture.powers([2048, 131072], 4) == [1024.0, 4096.0, 16384.0, 65536.0, 262144.0]
    assert line_picture.powers([16.0, 0.0], 16) == [16.0, 256.0]


def test_an_axis_that_cannot_be_drawn_is_refused_with_its_values():
    for y, value in ((Axis("share", {}), 0.5), (Axis("share", {0: "0", 1: "1"}, is_log=True), 0), (UP, float("nan"))):
        with pytest.raises(ValueError, match="has no place on axis 'share' with ticks"):
            drawn(Line("arm", "#123456", [Point(10, value)]), y=y)
    for values in ([0.0], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="a logarithmic axis needs finite values, a positive one too, got"):
            line_picture.powers(values, 2)
