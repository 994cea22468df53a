"""scripts/docs_charts.py: what is drawn is what the lines say, whole, escaped, and the same every time."""

import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from scripts import docs_charts
from scripts.docs_charts import engine_chart, figure, in_words, svg, training_chart

NAMESPACE = "{http://www.w3.org/2000/svg}"


def line(arm: str, *step_ms: float) -> dict[str, Any]:
    return {"kind": "case", "arm": arm, "step_ms": list(step_ms)}


WHOLE = [
    line("eager_fp32", 9.0),
    line("compile", 8.0),
    line("reduce_overhead", 5.0, 4.0, 90.0),
    line("max_autotune", 5.5),
    line("graph", 2.5),
    line("kitsune_dropin", 3.0),
    line("kitsune", 2.0),
]


def parsed(drawing: str) -> ET.Element:
    return ET.fromstring(drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def words_in(drawing: str) -> list[str]:
    return [element.text or "" for element in parsed(drawing).iter(f"{NAMESPACE}text")]


def widths_in(drawing: str) -> list[float]:
    return [float(element.attrib["width"]) for element in parsed(drawing).iter(f"{NAMESPACE}rect")]


def test_one_case_has_the_best_mode_and_the_three_others() -> None:
    chart = training_chart({"mlp/64": WHOLE})
    (group,) = chart.groups
    assert [(bar.arm, bar.share, bar.took_ms) for bar in group.bars] == [
        ("reduce_overhead", 1.0, 5.0),
        ("graph", 0.5, 2.5),
        ("kitsune_dropin", 0.6, 3.0),
        ("kitsune", 0.4, 2.0),
    ]
    words = words_in(svg(chart))
    assert words[0] == "mlp/64"
    assert {"torch.compile, reduce-overhead", "graph by hand", "drop-in", "TrainStep"} <= set(words)
    assert "0.40 (2 ms)" in words


def test_bars_are_as_long_as_their_shares() -> None:
    widths = widths_in(svg(training_chart({"mlp/64": WHOLE})))
    assert [width / widths[0] for width in widths] == pytest.approx([1.0, 0.5, 0.6, 0.4], abs=1e-4)


def test_the_longest_bar_ends_where_figures_begin() -> None:
    slow = [line("compile", 1.0), line("kitsune", 40.0)]
    widths = widths_in(svg(training_chart({"slow": slow, "quick": WHOLE})))
    assert max(widths) == docs_charts.RIGHT - docs_charts.LEFT
    assert min(widths) > 0


def test_arms_that_are_missing_are_left_out() -> None:
    chart = training_chart({"a": [line("max_autotune", 4.0), line("kitsune", 1.0)], "b": [line("compile", 2.0)]})
    assert [[bar.arm for bar in group.bars] for group in chart.groups] == [["max_autotune", "kitsune"], ["compile"]]
    assert len(widths_in(svg(chart))) == 3


def test_an_arm_without_samples_is_missing() -> None:
    (group,) = training_chart({"a": [line("compile"), line("reduce_overhead", 4.0), line("kitsune")]}).groups
    assert [bar.arm for bar in group.bars] == ["reduce_overhead"]


def test_a_case_that_cannot_be_compared_is_left_out() -> None:
    assert [group.case for group in training_chart({"a": [line("kitsune", 1.0)], "b": WHOLE}).groups] == ["b"]
    assert [group.case for group in engine_chart({"a": [line("k4", 1.0)], "b": [line("graph", 1.0)]}).groups] == ["b"]


@pytest.mark.parametrize("draw", [training_chart, engine_chart])
def test_nothing_to_show_is_an_error(draw: Any) -> None:
    with pytest.raises(ValueError, match="no results"):
        svg(draw({}))


def test_the_most_gained_comes_first_and_the_unknown_last() -> None:
    cases = {
        "unknown": [line("compile", 1.0)],
        "little": [line("compile", 1.0), line("kitsune", 0.9)],
        "b": WHOLE,
        "a": WHOLE,
    }
    assert [group.case for group in training_chart(cases).groups] == ["a", "b", "little", "unknown"]


def test_the_engine_is_held_against_its_one_graph() -> None:
    cases = {"mlp/64": [line("k8", 1.0), line("graph", 4.0), line("k4", 2.0), line("k1", 5.0)]}
    (group,) = engine_chart(cases).groups
    assert [(bar.arm, bar.share) for bar in group.bars] == [("graph", 1.0), ("k1", 1.25), ("k4", 0.5), ("k8", 0.25)]


def test_names_are_escaped() -> None:
    case = '<script>alert("x")</script> & co'
    chart = training_chart({case: WHOLE})
    drawing = svg(chart)
    assert "<script>" not in figure(chart)
    assert words_in(drawing)[0] == case
    assert case in (parsed(drawing).findtext(f"{NAMESPACE}desc") or "")


def test_what_is_seen_is_said() -> None:
    chart = training_chart({"mlp/64": WHOLE})
    root = parsed(svg(chart))
    title, told = root.find(f"{NAMESPACE}title"), root.find(f"{NAMESPACE}desc")
    assert title is not None and told is not None
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-labelledby"].split() == [title.attrib["id"], told.attrib["id"]]
    assert title.text == chart.title
    assert told.text == in_words(chart)
    assert "mlp/64: torch.compile, reduce-overhead 1.00 (5 ms), graph by hand 0.50 (2.5 ms)" in in_words(chart)


def test_two_charts_on_a_page_have_no_id_in_common() -> None:
    drawings = svg(training_chart({"a": WHOLE})), svg(engine_chart({"a": [line("graph", 1.0)]}))
    first, second = (set(re.findall(r' id="([^"]+)"', drawing)) for drawing in drawings)
    assert len(first) == len(second) == 2
    assert not first & second


def test_the_same_lines_give_the_same_text() -> None:
    cases = {"b": WHOLE, "a": WHOLE[:3]}
    shuffled = {case: lines[::-1] for case, lines in reversed(cases.items())}
    assert figure(training_chart(cases)) == figure(training_chart(shuffled))


def test_colours_are_those_of_the_page() -> None:
    drawing = svg(training_chart({"a": WHOLE}))
    colours = set(re.findall(r'(?:fill|stroke)="([^"]+)"', drawing))
    assert colours == {"currentColor", "var(--md-typeset-a-color, currentColor)"}


def test_markdown_leaves_it_alone() -> None:
    drawing = figure(training_chart({"a": WHOLE}))
    assert drawing.startswith("<figure ")
    assert drawing.endswith("</figure>")
    assert "\n" not in drawing
