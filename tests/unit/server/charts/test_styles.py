"""static/charts.css: every class in use has a rule, every rule is in use, every colour has a fall-back."""

import re
from pathlib import Path

from server.charts.in_use import in_use
from server.charts.pareto import pareto
from server.charts.samples import samples
from server.charts.search import TrialPoint, search_history
from server.charts.timeline import TimeSpan, timeline
from server.charts.trend import trend
from server.charts.waterfall import waterfall
from tests.unit.server.charts import test_in_use, test_pareto, test_samples, test_search, test_trend, test_waterfall
from tests.unit.server.charts.drawings import drawings

STATIC = Path(__file__).parents[4] / "server" / "pages" / "static"
CSS = (STATIC / "charts.css").read_text("utf-8")
#: The style sheet without comments.
RULES = re.sub(r"/\*.*?\*/", "", CSS, flags=re.DOTALL)


def drawn_classes() -> set[str]:
    sources = [TrialPoint(n, 1.0 + n, 1.0, 2.0 + n, f"source {n}", "x") for n in range(12)]
    kinds = [TimeSpan(0, n * 10.0, n * 10.0 + 9, f"kernel {n}") for n in range(7)]
    charts = [
        waterfall([]),
        waterfall(test_waterfall.BARS),
        pareto(test_pareto.PLAIN),
        search_history([*sources, *test_search.PLAIN]),
        samples(test_samples.PLAIN),
        trend(test_trend.moments(0, 30)),
        in_use(test_in_use.PLAIN),
        timeline([*kinds, TimeSpan(0, 100.0, 9000.0, "long")]),
    ]
    roots = [root for chart in charts for root in drawings(chart)]
    return {css for root in roots for element in root.iter() for css in (element.get("class") or "").split()} | {
        "chart"
    }


def test_classes_and_rules_belong_together():
    assert drawn_classes() == set(re.findall(r"\.([a-z][\w-]*)", RULES))


def test_colours_are_those_of_the_pages_with_a_fall_back():
    named = set(re.findall(r"var\(--(?!chart-)([\w-]+), #[0-9a-f]{6}\)", RULES))
    assert named == {"ink", "paper", "muted", "line", "accent", "good", "bad", *(f"series-{n}" for n in range(1, 7))}
    assert set(re.findall(r"var\(--(?!chart-)([\w-]+)", RULES)) == named
    assert named <= set(re.findall(r"--([\w-]+):", (STATIC / "kitsune.css").read_text("utf-8")))


def test_own_colours_are_defined_in_light_and_dark():
    light, dark = RULES.split("prefers-color-scheme: dark")
    used = set(re.findall(r"var\((--chart-\w+)\)", RULES))
    assert used == set(re.findall(r"(--chart-\w+):", light)) == set(re.findall(r"(--chart-\w+):", dark))
