"""The pages of a plan, of a model, and of a comparison of runs."""

import html
import re

import pytest

from tests.store.samples import an_environment
from tests.unit.server.conftest import bearer, secret
from tests.unit.server.pages import stories
from tests.unit.server.pages.visits import keep, shown


def test_a_plan_can_be_looked_at_and_saved(ada, database, tmp_path):
    run, _, plan = story = stories.with_a_gain()
    keep(database, story)
    text = shown(ada, f"/plans/{plan.plan_id}")
    for words in ("channels innermost, as tensor-core", "Applied on NVIDIA H200; refused", "128x3x32x32"):
        assert words in text
    assert f'href="/runs/{run.id}"' in text
    file = tmp_path / "plan.json"
    file.write_text(shown(ada, f"/plans/{plan.plan_id}/plan.json"), "utf-8")
    assert type(plan).load(file) == plan


def test_a_model_has_its_runs_gpu_by_gpu(ada, database):
    first = keep(database, stories.with_a_gain())
    other = stories.with_a_gain(environment=an_environment(gpu="NVIDIA A100"))
    keep(database, other)
    keep(database, (stories.a_gpu_run(environment=None), [], None))
    text = shown(ada, f"/models/{first.fingerprint}")
    for gpu in ("NVIDIA H200", "NVIDIA A100", "not looked at yet"):
        assert f">{gpu}</h2>" in text
    assert text.count('<div class="chart">') == 0  # a single run has no history
    keep(database, stories.with_a_gain())
    assert shown(ada, f"/models/{first.fingerprint}").count('<div class="chart">') == 1


def test_a_comparison_shows_what_differs(ada, database):
    one = keep(database, stories.with_a_gain())
    other = keep(database, stories.without_a_gain())
    text = shown(ada, f"/compare?ids={one.id}&ids={other.id}")
    names = re.findall(r'<th scope="row">([^<]*)</th>', text)
    assert {"layout", "gain", "verdict", "memory change"} < set(names)
    assert "GPU" not in names and "seed" not in names
    assert "<code>knobs.layout</code>" in text
    every = shown(ada, f"/compare?ids={one.id},{other.id}&all=true")
    assert {"GPU", "seed"} < set(re.findall(r'<th scope="row">([^<]*)</th>', every))
    assert "notice warn" not in every


def test_a_comparison_tells_how_runs_ended(ada, database):
    one, other = keep(database, stories.with_a_gain(name="nightly")), keep(database, stories.failed())
    text = html.unescape(shown(ada, f"/compare?ids={one.id},{other.id}"))
    assert {"name", "state", "error", "took"} < set(re.findall(r'<th scope="row">([^<]*)</th>', text))
    assert "nightly" in text and other.error in text


def test_a_comparison_warns_of_what_cannot_be_compared(ada, database):
    one = keep(database, stories.with_a_gain())
    machine = an_environment(gpu="NVIDIA A100", torch="2.11.0")
    run, tried, _ = stories.with_a_gain(environment=machine, fingerprint="c" * 64)
    other = keep(database, (run.evolve(plan_id=None), tried, None))
    text = shown(ada, f"/compare?ids={one.id},{other.id}")
    said = re.findall(r'<p class="notice warn">([^<]*)\.</p>', html.unescape(text))
    assert "Measured on different GPUs (NVIDIA A100, NVIDIA H200): times do not compare, gains only with care" in said
    headers = bearer(secret(database))
    told = ada.client.get(f"/api/v1/compare?ids={one.id},{other.id}", headers=headers).json()["warnings"]
    assert said == [warning[:1].upper() + warning[1:] for warning in told], "in the words of the API"


def test_a_comparison_of_nothing_says_how_to_choose(ada):
    text = shown(ada, "/compare", 422)
    assert 'in <a href="/runs">the list</a>' in text and "None was chosen" in text and "query.ids" not in text


@pytest.mark.parametrize("count", [0, 1, 21])
def test_two_to_twenty_runs_are_compared(ada, count):
    ids = ",".join(f"run{number}" for number in range(count))
    assert "choose 2 to 20 runs" in shown(ada, f"/compare?ids={ids}", 422).lower()


def test_every_page_allows_nothing_but_files_of_ours(ada, stranger, database):
    run = keep(database, stories.with_a_gain())
    for path in (f"/runs/{run.id}", f"/plans/{run.plan_id}", f"/models/{run.fingerprint}"):
        answer = ada.client.get(path)
        assert "script-src 'self'; style-src 'self'" in answer.headers["content-security-policy"]
        assert " style=" not in answer.text and "<style" not in answer.text
        assert re.findall(r"\son\w+=", answer.text) == []
        assert answer.headers["cache-control"] == "no-store"
