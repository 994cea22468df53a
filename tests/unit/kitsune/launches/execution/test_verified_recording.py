"""A recording that is kept only if its launches, issued again, are the step. On the CPU twin."""

import torch

from kitsune.launches.execution.verified_recording import verified
from tests.unit.kitsune.launches.steps import CPU, equal, sgd, warmed


class OfTheirOwn(Exception):
    """Of the user's code: derives from nothing that anybody else raises."""


def test_what_is_the_step_is_kept():
    step, twin = warmed("branches", sgd)
    found = verified(step, CPU, step.inputs, ())
    expected = twin()
    assert found.refusal == ""
    assert found.recording is not None
    assert torch.equal(found.result[0], expected[0])
    assert equal(step.state(), twin.state())


def test_what_the_step_raises_in_a_further_run_is_a_reason_and_not_an_error():
    step, twin = warmed("branches", sgd)
    plain, calls = step.model.forward, []

    def forward(x):
        calls.append(len(calls))
        if len(calls) > 1:
            raise OfTheirOwn("called twice")
        return plain(x)

    step.model.forward = forward
    found = verified(step, CPU, step.inputs, ())
    expected = twin()
    assert found.recording is None
    assert found.refusal == "issued again they differ from the step: OfTheirOwn: called twice"
    assert torch.equal(found.result[0], expected[0])
    assert equal(step.state(), twin.state())


def test_backwards_run_on_the_thread_that_issues_their_launches():
    step, _ = warmed("branches", sgd)
    threads: list[bool] = []
    found = verified(lambda: threads.append(torch._C._is_multithreading_enabled()) or step(), CPU, step.inputs, ())
    assert found.recording is not None
    assert len(threads) > 1
    assert not any(threads)
    assert torch._C._is_multithreading_enabled()
