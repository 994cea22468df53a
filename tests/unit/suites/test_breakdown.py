"""Suite breakdown and its picture: plans that may be, each one knob more, and a waterfall of what was measured."""

import sys
from xml.etree import ElementTree as ET

import pytest

from benchmarks import waterfall
from benchmarks.breakdown import ADDED, BASELINE, BREAKDOWN_CASES, builds_of, plans
from benchmarks.cases import CASES
from benchmarks.waterfall import bars_of, svg_of
from tuner.search.space import Space

NAMESPACE = "{http://www.w3.org/2000/svg}"
WHOLE = {BASELINE: [9.0, 10.0, 90.0], "+ graphs": [5.0], "+ streams": [4.0], "+ fusion": [6.0], "+ amp": [2.0]}


def lines_of(arms, notes=""):
    return [{"kind": "case", "arm": arm, "step_ms": ms, "notes": notes} for arm, ms in arms.items()]


def texts_of(picture):
    return [element.text for element in ET.fromstring(picture).iter(f"{NAMESPACE}text")]


def test_each_plan_is_allowed_and_holds_the_knobs_before_it():
    before = {}
    for arm, plan in plans().items():
        assert Space.of().allows(plan.knobs) is None
        assert dict(plan.knobs) == before | ADDED[arm]
        assert len(plan.knobs) == len(before) + 1
        before = dict(plan.knobs)


def test_the_manuals_order_cannot_be():
    assert "only launches that are captured" in (Space.of().allows(ADDED["+ streams"]) or "")


def test_every_case_has_every_arm():
    assert set(BREAKDOWN_CASES) <= CASES.keys()
    assert list(builds_of(CASES[BREAKDOWN_CASES[0]])) == [BASELINE, *ADDED]


def test_a_bar_tells_ms_and_the_factor_over_the_baseline():
    assert [bar.label for bar in bars_of(lines_of(WHOLE))] == [
        "10 ms",
        "5 ms, 2.00x",
        "4 ms, 2.50x",
        "6 ms, 1.67x",
        "2 ms, 5.00x",
    ]


def test_the_picture_shows_case_arms_and_figures():
    picture = svg_of({"resnet18/128": bars_of(lines_of(WHOLE))})
    texts = texts_of(picture)
    assert texts[0] == "resnet18/128"
    assert set(WHOLE) <= set(texts)
    assert "4 ms, 2.50x" in texts
    assert "currentColor" in picture and "prefers-color-scheme:dark" in picture
    assert picture == svg_of({"resnet18/128": bars_of(lines_of(WHOLE))})


def test_lengths_are_what_was_measured():
    rects = list(ET.fromstring(svg_of({"a": bars_of(lines_of(WHOLE))})).iter(f"{NAMESPACE}rect"))
    widths = [float(rect.attrib["width"]) for rect in rects]
    unit = widths[0] / 10
    assert widths == pytest.approx(
        [10 * unit, 5 * unit, 5 * unit, 4 * unit, unit, 4 * unit, 2 * unit, 2 * unit, 4 * unit]
    )
    assert all(
        float(rect.attrib["x"]) + width <= waterfall.RIGHT + 0.02 for rect, width in zip(rects, widths, strict=True)
    )
    assert [rect.attrib["fill"] for rect in rects].count("#d1242f") == 1  # fusion cost time


def test_an_arm_that_is_missing_or_was_not_measured_is_left_out():
    some = {BASELINE: [10.0], "+ streams": [], "+ amp": [5.0]}
    assert [bar.arm for bar in bars_of(lines_of(some))] == [BASELINE, "+ amp"]
    assert bars_of(lines_of({"+ amp": [5.0]})) == []
    assert bars_of([]) == []
    with pytest.raises(ValueError, match="no breakdown has a baseline"):
        svg_of({"a": []})


def test_a_plan_that_was_declined_is_told_of():
    (_, bar) = bars_of(lines_of({BASELINE: [10.0], "+ streams": [10.0]}, notes="declined  streams: no"))
    assert bar.label == "10 ms, 1.00x, declined in part"


def test_names_are_escaped():
    assert "<b>&" in texts_of(svg_of({"<b>&": bars_of(lines_of(WHOLE))}))


def test_the_newest_file_becomes_a_picture(tmp_path, monkeypatch):
    (tmp_path / "2026-11-22-h200.jsonl").write_text(
        '{"kind": "environment"}\n'
        '{"kind": "case", "case": "mlp/64", "arm": "baseline", "step_ms": [2.0], "notes": ""}\n'
        '{"kind": "case", "case": "mlp/64", "arm": "+ graphs", "step_ms": [1.0], "notes": ""}\n'
    )
    out = tmp_path / "assets" / "breakdown.svg"
    monkeypatch.setattr(sys, "argv", ["waterfall", "--results", str(tmp_path), "--out", str(out)])
    waterfall.main()
    assert texts_of(out.read_text()) == ["mlp/64", "baseline", "2 ms", "+ graphs", "1 ms, 2.00x"]
