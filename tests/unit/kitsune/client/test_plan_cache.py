"""Kept plans: whole, of this question, for this machine, or not at all."""

import json
import os
import threading

import pytest

from kitsune.client.plan_cache import PlanCache
from kitsune.plan import Environment, Plan, PlanQuery

HERE = Environment(device="cpu", gpu="Some CPU", memory_bytes=2**34, torch="2.13.0", python="3.11.7", kitsune="0.1.0")
PLAN = Plan(knobs={"precision": "bf16"}, fingerprint="f" * 64, environment=HERE)
ASKED = PlanQuery("f" * 64, "4x8")
URL = "http://127.0.0.1:8537"


@pytest.fixture
def cache():
    found = PlanCache(URL)
    found.keep(ASKED, HERE, PLAN)
    return found


def the_file(cache):
    (file,) = cache.folder.iterdir()
    return file


def test_kept_under_the_home_folder_and_found_again(cache, kitsune_home):
    assert cache.folder.is_relative_to(kitsune_home / "plans")
    assert PlanCache(URL).get(ASKED, HERE) == PLAN
    assert not PlanCache(URL).is_empty
    for private in (the_file(cache), *the_file(cache).parents[:3]):
        assert private.stat().st_mode & 0o077 == 0


def test_another_question_another_machine_and_another_server_have_their_own(cache):
    assert cache.get(PlanQuery("g" * 64), HERE) is None
    assert cache.get(ASKED, HERE.model_copy(update={"torch": "2.14.0"})) is None
    assert PlanCache("http://127.0.0.1:9").get(ASKED, HERE) is None
    assert PlanCache("http://127.0.0.1:9").is_empty


def test_another_version_of_python_is_the_same_question(cache):
    assert cache.get(ASKED, HERE.model_copy(update={"python": "3.12.1", "kitsune": "9"})) == PLAN


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(os.urandom(300)),
        lambda file: file.write_bytes(file.read_bytes()[:-40]),
        lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), "knobs": {"precision": "fp16"}})),
        lambda file: file.write_text(file.read_text() + " " * 300_000),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    ],
)
def test_a_damaged_file_is_no_plan(cache, damage):
    damage(the_file(cache))
    assert cache.get(ASKED, HERE) is None


def test_a_plan_of_another_gpu_is_not_taken_even_from_the_right_file(cache):
    other = PLAN.model_copy(update={"environment": HERE.model_copy(update={"gpu": "Another"})})
    other.save(the_file(cache))
    assert cache.get(ASKED, HERE) is None


def test_a_plan_of_another_step_is_not_taken_even_from_the_right_file(cache):
    PLAN.model_copy(update={"fingerprint": "e" * 64}).save(the_file(cache))
    assert cache.get(ASKED, HERE) is None


def test_another_batch_is_another_question(cache):
    assert cache.get(PlanQuery("f" * 64, "9x8"), HERE) is None


def test_a_plan_of_no_machine_is_not_taken(cache):
    Plan.by_hand(precision="bf16").save(the_file(cache))
    assert cache.get(ASKED, HERE) is None


def test_forgotten(cache):
    cache.forget(ASKED, HERE)
    assert cache.get(ASKED, HERE) is None
    assert cache.is_empty
    cache.forget(ASKED, HERE)


def test_a_folder_that_cannot_be_made_costs_nothing(kitsune_home, caplog):
    kitsune_home.parent.mkdir(exist_ok=True)
    kitsune_home.write_text("a file")
    cache = PlanCache(URL)
    caplog.set_level("INFO")
    cache.keep(ASKED, HERE, PLAN)
    assert "cannot cache the plan" in caplog.text
    assert cache.get(ASKED, HERE) is None
    assert cache.is_empty


def test_many_writers_leave_one_whole_file(cache):
    writers = [threading.Thread(target=cache.keep, args=(ASKED, HERE, PLAN)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert cache.get(ASKED, HERE) == PLAN
    assert [file.suffix for file in cache.folder.iterdir()] == [".json"]
