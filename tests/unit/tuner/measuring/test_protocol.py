import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kitsune.class_tables import ClassTable
from kitsune.errors import MeasureError, PlanError
from kitsune.plan import Environment, Numerics
from kitsune.timeline import ClassTime
from tests.store.samples import a_timeline
from tuner.measuring.protocol import (
    MAX_LAUNCHES,
    MAX_LINE_BYTES,
    ArmSpec,
    Inspection,
    Job,
    LineReader,
    Message,
    misfit,
    one_line,
    parse_message,
)
from tuner.records import Arm, Failure, FailureKind, Measurement, Phase

ENVIRONMENT = Environment(device="cpu", gpu="a CPU", memory_bytes=1, torch="2.13.0", python="3.11.7", kitsune="0.1.0")
NUMERICS = Numerics(
    steps=5,
    loss_error=0,
    gradient_error=0,
    parameter_error=0,
    loss_allowed=1,
    gradient_allowed=1,
    parameter_allowed=1,
)
JOB = Job(
    workload="zoo:mlp",
    device="cpu",
    arms=(ArmSpec(name="eager"), ArmSpec(name="candidate", knobs={"precision": "bf16"})),
)
INSPECTION = Inspection(
    environment=ENVIRONMENT, fingerprint="f", inapplicable={}, random=False, step_ms=1.0, peak_bytes=0, parameters=1
)


def arm(name: str, step_ms: tuple[float, ...] = (1.0, 1.1), **knobs: str) -> Arm:
    return Arm(name=name, knobs=knobs, step_ms=step_ms, peak_bytes=0, first_step_s=0.1)


def measurement(**changes: object) -> Measurement:
    fields = {
        "arms": (arm("eager"), arm("candidate", precision="bf16")),
        "steps_per_block": (3, 4),
        "numerics": NUMERICS,
        "environment": ENVIRONMENT,
    }
    return Measurement(**{**fields, **changes})


TIMELINE = a_timeline()
CLASSES = ClassTable(classes=(ClassTime("gaps", 2, 3.0, 0.0),), notes=("so",))
FAILURE = Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason="so")
MESSAGES = st.sampled_from(
    [
        *(Message(phase=phase) for phase in Phase),
        Message(failure=FAILURE),
        Message(measurement=measurement()),
        Message(measurement=measurement(), timeline=TIMELINE),
        Message(inspection=INSPECTION),
        Message(classes=CLASSES),
    ]
)


@given(st.lists(MESSAGES, max_size=6), st.integers(1, 200))
def test_messages_survive_any_chunking(messages, size):
    data = b"".join(message.line() for message in messages)
    reader = LineReader()
    heard = [message for start in range(0, len(data), size) for message in reader.feed(data[start : start + size])]
    assert heard == messages


@given(st.binary(max_size=300))
def test_bytes_are_messages_or_a_measure_error(data):
    reader = LineReader()
    try:
        heard = reader.feed(data)
    except MeasureError:
        return
    assert all(isinstance(message, Message) for message in heard)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    )
)
def test_json_of_another_kind_is_refused(value):
    with pytest.raises(MeasureError):
        parse_message(json.dumps(value).encode())


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-1", "0", '"1"', "[]", "1e999"])
def test_a_time_that_is_none_does_not_pass(text):
    line = Message(measurement=measurement()).line().decode().replace("[1.0,1.1]", f"[{text},1.1]", 1)
    assert text in line
    try:
        message = parse_message(line.encode())
    except MeasureError:
        return
    assert message.measurement is not None
    assert text == '"1"' or misfit(JOB, message.measurement)


def test_a_line_without_end_is_cut_off():
    reader = LineReader(max_line_bytes=100)
    reader.feed(b"x" * 100)
    with pytest.raises(MeasureError, match="line of more than 100 bytes"):
        reader.feed(b"x")


def test_the_whole_is_bounded():
    line = Message(phase=Phase.BUILD).line()
    reader = LineReader(max_total_bytes=3 * len(line))
    for _ in range(3):
        assert reader.feed(line) == [Message(phase=Phase.BUILD)]
    with pytest.raises(MeasureError, match="more than"):
        reader.feed(b"\n")


def test_a_job_survives_json():
    assert Job.model_validate_json(JOB.model_dump_json()) == JOB


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": ()},
        {"arms": (ArmSpec(name="eager"),)},
        {"arms": (ArmSpec(name="same"), ArmSpec(name="same"))},
        {"rounds": 0},
        {"budget_s": 0},
        {"block_ms": -1.0},
        {"kind": "else"},
        {"kind": "explain"},
        {"surprise": 1},
    ],
)
def test_a_job_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ValidationError):
        Job.model_validate({**JOB.model_dump(), **changes})


@pytest.mark.parametrize("knobs", [{"warp": "9"}, {"precision": "fp8000"}])
def test_an_arm_with_invalid_knobs_is_refused(knobs):
    with pytest.raises((PlanError, ValidationError)):
        ArmSpec(name="arm", knobs=knobs)


def test_an_answer_that_fits():
    assert misfit(JOB, measurement()) is None
    assert misfit(Job(kind="inspect", workload="w", device="cpu"), INSPECTION) is None
    assert misfit(JOB.model_copy(update={"numerics": False}), measurement(numerics=None)) is None


@pytest.mark.parametrize(
    "answer",
    [
        INSPECTION,
        measurement(arms=(arm("eager"), arm("candidate"))),
        measurement(arms=(arm("candidate", precision="bf16"), arm("eager"))),
        measurement(arms=(arm("eager"),)),
        measurement(arms=(arm("eager", (1.0,)), arm("candidate", precision="bf16"))),
        measurement(arms=(arm("eager", ()), arm("candidate", (), precision="bf16"))),
        measurement(arms=(arm("eager", (1.0, 0.0)), arm("candidate", precision="bf16"))),
        measurement(arms=(arm("eager", (1.0, -1.0)), arm("candidate", precision="bf16"))),
        measurement(steps_per_block=(1,)),
        measurement(steps_per_block=(1, 0)),
        measurement(numerics=None),
    ],
)
def test_an_answer_to_another_question(answer):
    assert misfit(JOB, answer)


def test_a_measurement_does_not_answer_an_inspection():
    assert misfit(Job(kind="inspect", workload="w", device="cpu"), measurement())


def test_a_timeline_is_sent_beside_its_measurement():
    outcome = parse_message(Message(measurement=measurement(), timeline=TIMELINE).line()).outcome
    assert isinstance(outcome, Measurement)
    assert outcome.timeline == TIMELINE
    assert outcome.model_copy(update={"timeline": None}) == measurement()
    assert "timeline" not in outcome.model_dump()
    assert "timeline" not in json.loads(outcome.canonical_json())
    with pytest.raises(MeasureError, match="a timeline comes with a measurement"):
        parse_message(json.dumps({"phase": "build", "timeline": json.loads(TIMELINE.model_dump_json())}).encode())


def test_a_timeline_that_was_not_asked_for_or_is_too_long_does_not_fit():
    found = measurement(timeline=TIMELINE)
    asking = JOB.model_copy(update={"timeline": True})
    too_long = a_timeline(MAX_LAUNCHES + 1)
    assert misfit(asking, found) is None
    assert misfit(asking, measurement()) is None
    for job, outcome in ((JOB, found), (asking, measurement(timeline=too_long))):
        assert "a timeline that was not asked for or is too long" in misfit(job, outcome)
    assert len(Message(measurement=measurement(), timeline=a_timeline(MAX_LAUNCHES, 8)).line()) < MAX_LINE_BYTES // 4


def test_classes_answer_a_job_that_explains_one_arm_and_no_other():
    explaining = Job(kind="explain", workload="w", device="cpu", arms=(ArmSpec(name="eager"),))
    assert parse_message(Message(classes=CLASSES).line()).outcome == CLASSES
    assert misfit(explaining, CLASSES) is None
    assert "recorded no launches" in misfit(explaining, ClassTable(missing="so"))
    assert misfit(JOB, CLASSES) == "it was asked to measure, and did explain"
    assert misfit(explaining, measurement()) == "it was asked to explain, and did measure"


@given(st.text(max_size=300), st.integers(1, 100))
def test_one_line_is_one_printable_line(text, limit):
    line = one_line(text, limit)
    assert len(line) <= limit
    assert line.isprintable()
    assert Failure(kind=FailureKind.RAISED, phase=Phase.BUILD, reason=line).reason == line
