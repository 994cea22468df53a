"""What a crew does to what it times: figures of measurements, and which children are kept at work."""

from collections.abc import Callable

from benchmarks.neighbours import NEIGHBOURS, ROUNDS, TIMED, Measurer, figures, line_of
from tests.unit.tuner.machine import Machine, OneByOne
from tuner.measuring.crew import Finished
from tuner.measuring.protocol import Job, Limits


def a_line(neighbours: int, step_ms: float, again_ms: float) -> dict[str, object]:
    times = {"step_ms": [step_ms] * ROUNDS, "again_ms": [again_ms] * ROUNDS}
    return {"kind": "measurement", "knobs": TIMED[0], "neighbours": neighbours, **times}


def test_how_far_a_step_lies_from_itself_and_from_itself_alone():
    lines = [a_line(0, 10.0, 10.0), a_line(0, 10.0, 10.2), a_line(3, 10.1, 10.1), a_line(3, 10.1, 10.1)]
    found = {case: value for case, value, _, _ in figures(lines)}
    assert round(found["eager, alone: a step differs from itself by"], 2) == 1.4
    assert found["eager, alone: by more than 0.5 %"] == 50
    assert found["eager, beside others: by more than 0.5 %"] == 0
    assert round(found["eager: slower beside others by"], 6) == 1


def test_of_a_step_that_was_not_measured_beside_others_nothing_is_said():
    assert list(figures([a_line(0, 10.0, 10.0)])) == []


class Shared(OneByOne):
    """Answers the neighbours first, as often as they are asked in a row."""

    def finished(self, check: Callable[[], None]) -> Finished:
        self.most = max(getattr(self, "most", 0), len(self.waiting))
        return super().finished(check)

    def begin(self, job: Job, limits: Limits) -> int:
        ticket = super().begin(job, limits)
        if len(self.waiting) > NEIGHBOURS + 1:
            raise AssertionError("more than the neighbours and the one that is timed")
        return ticket


def test_neighbours_that_end_are_replaced_until_the_measurement_has_ended():
    machine = Machine()
    crew = Shared(machine)
    measurer = Measurer(crew, "zoo:mlp", "cpu", settle_s=0.0)
    found = measurer.measured({}, NEIGHBOURS)
    assert found is not None
    assert len(crew.waiting) == NEIGHBOURS, "they go on"
    assert line_of({}, NEIGHBOURS, found)["again_ms"] == found.arms[1].step_ms
    assert measurer.measured({}, 0) is not None
    assert crew.waiting == {}
    assert crew.most == NEIGHBOURS + 1
