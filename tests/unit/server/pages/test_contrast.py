"""The contrast of the colours of the pages, by the formula of WCAG 2.2."""

import re

import pytest

from server.pages.assets import FOLDER

CSS = (FOLDER / "kitsune.css").read_text("utf-8")
GROUNDS = ("paper", "wash")
TEXTS = ("ink", "muted", "accent", "good", "bad", "warn")
#: Borders of fields, and lines and dots of charts: not text, so a contrast of 3 is enough.
MARKS = ("edge", *(f"series-{number}" for number in range(1, 7)))


def colours(theme: str) -> dict[str, str]:
    light, dark = (dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", part)) for part in CSS.split("@media", 2)[:2])
    return light if theme == "light" else {**light, **dark}


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_formula_is_right():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("ground", GROUNDS)
def test_text_and_marks_stand_out(theme, ground):
    known = colours(theme)
    for name in TEXTS:
        assert contrast(known[name], known[ground]) >= 4.5, name
    for name in MARKS:
        assert contrast(known[name], known[ground]) >= 3, name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_buttons_can_be_read(theme):
    known = colours(theme)
    assert contrast(known["on-accent"], known["accent"]) >= 4.5


def test_dark_names_every_colour_that_light_names():
    light, dark = (set(re.findall(r"--([a-z0-9-]+): #", part)) for part in CSS.split("@media", 2)[:2])
    assert light == dark and len(light) > 12
