"""Plans: content, identity, and what is refused."""

import copy
import json
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitsune.errors import PlanError
from kitsune.knobs import KNOBS
from kitsune.long_proof import LongProof, Margin
from kitsune.plan import (
    LATER_EVIDENCE,
    MAX_PLAN_BYTES,
    Environment,
    Evidence,
    Interval,
    Match,
    Numerics,
    Plan,
    checked_knobs,
)

KNOB_CHOICES = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(list(knob.choices)) for name, knob in KNOBS.items()}
)
TEXT = st.text(max_size=20)
ENVIRONMENTS = st.builds(
    Environment,
    device=st.sampled_from(["cuda", "cpu"]),
    gpu=TEXT,
    compute_capability=TEXT,
    memory_bytes=st.integers(0, 2**50),
    driver=TEXT,
    cuda=TEXT,
    torch=TEXT,
    triton=TEXT,
    python=TEXT,
    kitsune=TEXT,
)
POSITIVE = st.floats(1e-9, 1e9)
ERRORS = st.floats(0, 1e9)
INTERVALS = st.builds(Interval, median=POSITIVE, low=POSITIVE, high=POSITIVE)
NUMERICS = st.builds(
    Numerics,
    steps=st.integers(1, 99),
    note=TEXT,
    **{f"{what}_{kind}": ERRORS for what in ("loss", "gradient", "parameter") for kind in ("error", "allowed")},
)
BEFORE = st.builds(
    Evidence,
    run_id=TEXT,
    verdict=st.sampled_from(["faster", "same"]),
    baseline=TEXT,
    baseline_step_ms=POSITIVE,
    step_ms=POSITIVE,
    speedup=INTERVALS,
    eager_step_ms=POSITIVE,
    speedup_over_eager=INTERVALS,
    baseline_peak_bytes=st.integers(0, 2**50),
    peak_bytes=st.integers(0, 2**50),
    first_step_s=ERRORS,
    blocks=st.integers(1, 10**6),
    samples_sha256=TEXT,
    numerics=NUMERICS,
)
PROOFS = st.builds(
    LongProof,
    steps=st.integers(0, 200),
    restarts=st.integers(0, 48),
    updates=st.integers(0, 16),
    directions=st.integers(0, 64),
    margins=st.lists(st.builds(Margin, what=TEXT, where=TEXT, error=ERRORS, allowed=ERRORS), max_size=3).map(tuple),
    notes=st.lists(TEXT, max_size=2).map(tuple),
)
EVIDENCE = BEFORE | st.builds(
    lambda before, **later: before.model_copy(update=later),
    BEFORE,
    verdict=st.sampled_from(["faster", "same", "ambiguous", "too_noisy"]),
    prediction=st.none() | INTERVALS,
    process_spread=st.none() | ERRORS,
    process_degrees=st.integers(0, 99),
    processes=st.integers(1, 99),
    note=TEXT,
    proof=st.none() | PROOFS,
)
PLANS = st.builds(
    Plan,
    knobs=KNOB_CHOICES,
    fingerprint=TEXT,
    environment=st.none() | ENVIRONMENTS,
    evidence=st.none() | EVIDENCE,
)
HERE = Environment(device="cpu", gpu="a", memory_bytes=1, torch="2", python="3", kitsune="0")


@given(PLANS)
def test_a_plan_survives_json(plan):
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.plan_id == plan.plan_id


def test_a_plan_survives_a_file(tmp_path):
    plan = Plan(knobs={"update": "fused"}, fingerprint="é", environment=HERE)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@given(PLANS, st.data())
def test_altering_a_plan_is_noticed(plan, data):
    content = plan.to_json()
    field = data.draw(st.sampled_from(["knobs", "fingerprint", "environment", "plan_id"]))
    other = {
        "knobs": {"update": "foreach"} if plan.choice("update") != "foreach" else {},
        "fingerprint": plan.fingerprint + "x",
        "environment": None if plan.environment else HERE.model_dump(),
        "plan_id": "0" * 64,
    }[field]
    with pytest.raises(PlanError, match="plan_id"):
        Plan.from_json(content | {field: other})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"knobs": {"warp": "9"}}, "knobs.warp"),
        ({"knobs": {"precision": "fp8"}}, "knobs.precision"),
        ({"knobs": {"update": ["fused"]}}, "knobs"),
        ({"knobs": "fused"}, "knobs"),
        ({"format_version": 2}, "format_version"),
        ({"format_version": "1"}, "format_version"),
        ({"format_version": None}, "format_version"),
        ({"extra": 1}, "extra"),
        ({"fingerprint": 3}, "fingerprint"),
        ({"environment": {"device": "tpu"}}, "environment"),
        ({"evidence": {}}, "evidence"),
        ({"plan_id": None}, "plan_id"),
    ],
)
def test_a_malformed_plan_is_refused_by_name(change, field):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(Plan.by_hand(update="fused").to_json() | change)
    assert field in f"{caught.value.field} {caught.value}"
    assert caught.value.field.startswith(field.partition(".")[0])


def test_numbers_that_are_none_are_refused():
    evidence = {"step_ms": float("nan")}
    with pytest.raises(PlanError, match="evidence"):
        Plan.from_json(Plan().to_json() | {"evidence": evidence})


@pytest.mark.parametrize("value", [None, [], "plan", 3, b"{}"])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(PlanError, match="not a JSON object"):
        Plan.from_json(value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused(tmp_path, data):
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(PlanError, match="is not JSON"):
        Plan.load(tmp_path / "plan.json")


def test_a_large_file_is_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(b" " * (MAX_PLAN_BYTES + 1))
    with pytest.raises(PlanError, match="larger than"):
        Plan.load(tmp_path / "plan.json")


@given(KNOB_CHOICES)
def test_defaults_are_no_part_of_a_plan(knobs):
    plan = Plan(knobs=knobs)
    assert all(plan.choice(name) == knobs.get(name, knob.default) for name, knob in KNOBS.items())
    assert plan == Plan(knobs={name: plan.choice(name) for name in KNOBS})
    assert all(choice != KNOBS[name].default for name, choice in checked_knobs(knobs).items())


def test_a_plan_by_hand_names_what_is_wrong():
    assert Plan.by_hand(update="fused").knobs == {"update": "fused"}
    with pytest.raises(PlanError, match=r"knobs\.speed.*there are layout, precision"):
        Plan.by_hand(speed="high")
    with pytest.raises(PlanError, match=r"knobs\.update.*choose one of given, foreach, fused"):
        Plan.by_hand(update="quick")

    with pytest.raises(PlanError, match=r"knobs\.update.*cannot be \['fused'\]"):
        Plan.by_hand(update=["fused"])
    for name in ("streams", "prefetch"):
        with pytest.raises(PlanError, match=rf"knobs\.{name}.*cannot be True"):
            Plan.by_hand(**{name: True})


@pytest.mark.parametrize("plan", [Plan(), Plan.by_hand(update="fused")])
@pytest.mark.parametrize(
    "change",
    [
        lambda knobs: knobs.__setitem__("precision", "fp16"),
        lambda knobs: knobs.update(precision="fp16"),
        lambda knobs: knobs.setdefault("precision", "fp16"),
        lambda knobs: knobs.__ior__({"precision": "fp16"}),
        lambda knobs: knobs.__delitem__("update"),
        lambda knobs: knobs.pop("update"),
        lambda knobs: knobs.popitem(),
        lambda knobs: knobs.clear(),
    ],
)
def test_the_choices_of_a_plan_cannot_be_changed(plan, change):
    before = plan.to_json()
    with pytest.raises(TypeError, match="make another plan"):
        change(plan.knobs)
    assert plan.to_json() == before


@given(PLANS)
def test_a_copy_of_a_plan_is_the_same_plan_and_as_closed(plan):
    copies = [pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), copy.copy(plan), plan.model_copy(deep=True)]
    assert {plan, *copies} == {plan}
    assert {again.plan_id for again in copies} == {plan.plan_id}
    for again in copies:
        with pytest.raises(TypeError):
            again.knobs["precision"] = "fp16"


def test_new_choices_of_a_copy_are_checked_and_closed():
    again = Plan.by_hand(update="fused").model_copy(update={"knobs": {"precision": "bf16", "update": "given"}})
    assert again == Plan.by_hand(precision="bf16")
    with pytest.raises(TypeError):
        again.knobs["precision"] = "fp16"
    with pytest.raises(PlanError, match=r"knobs\.speed"):
        again.model_copy(update={"knobs": {"speed": "high"}})


def test_a_plan_written_before_its_choices_were_closed_is_the_same_plan():
    plan = Plan(knobs={"update": "fused", "streams": 2, "capture": "step"}, fingerprint="f" * 64)
    assert plan.plan_id == "846d70aec321e822882d65d2c75b85ef3185bcccb3db16c54f64db2d6e2c4735"


@given(ENVIRONMENTS)
def test_an_environment_matches_itself(environment):
    assert environment.match(environment)[0] is Match.EXACT


@pytest.mark.parametrize(
    ("change", "match", "words"),
    [
        ({"gpu": "b"}, Match.REFUSED, "tuned on a"),
        ({"device": "cuda"}, Match.REFUSED, "this is a (cuda)"),
        ({"torch": "3"}, Match.COMPATIBLE, "tuned with torch 2, this is 3"),
        ({"memory_bytes": 2}, Match.COMPATIBLE, "memory_bytes"),
        ({"driver": "9"}, Match.COMPATIBLE, "driver"),
        ({"python": "4", "kitsune": "1"}, Match.EXACT, "same machine"),
    ],
)
def test_how_well_an_environment_fits(change, match, words):
    found, reason = HERE.match(HERE.model_copy(update=change))
    assert found is match
    assert words in reason


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "plan.json"
    Plan().save(path)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        Plan.by_hand(update="fused").save(path)
    assert Plan.load(path) == Plan()
    assert os.listdir(tmp_path) == ["plan.json"]


@given(BEFORE)
def test_a_plan_of_before_keeps_its_id(evidence):
    """Its file and its row in a database lack what came later."""
    plan = Plan(evidence=evidence)
    content = json.loads(plan.canonical_json())
    assert not set(LATER_EVIDENCE) & set(content["evidence"])
    assert Plan.from_json({**content, "plan_id": plan.plan_id}) == plan == Plan.from_json(plan.to_json())
    later = Plan(evidence=evidence.model_copy(update={"processes": 5, "note": "seen"}))
    assert later.plan_id != plan.plan_id
    assert Plan.from_json(later.to_json()) == later
