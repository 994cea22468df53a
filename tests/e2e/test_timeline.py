"""The launches of a step, planned on streams by a real measuring process, up to the page; on the CPU twin."""

from fastapi.testclient import TestClient

from kitsune.launches.planning.trace_export import trace_of
from kitsune.timeline import Timeline
from server.app import create_app
from server.settings import ServerSettings
from tests.one_job import outcome_of
from tests.store.carrying import carried_out, claimed
from tests.unit.tuner.machine import Machine, only
from tuner.measuring.protocol import ArmSpec, Job
from tuner.records import Measurement
from tuner.statistics.plan_evidence import words
from tuner.store.engine import open_database
from tuner.store.queries import tokens
from tuner.store.queries.tokens import Scope

ON_STREAMS = {"capture": "step", "streams": 4}
#: Techniques of a GPU apply in the process that loads this: its graphs are HostGraphs, its streams threads.
BRANCHES = """
from dataclasses import replace
import torch
from torch import nn
from kitsune import Workload
from kitsune.techniques.capture import Capture
from kitsune.techniques.streams import Streams

why_not = Capture.why_not
Capture.why_not = lambda self, choice, facts: why_not(self, choice, replace(facts, device="cuda"))
Streams.why_not = lambda self, choice, facts: None


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.last = nn.Linear(256, 4)

    def forward(self, x):
        return self.last(sum(torch.tanh(branch(x)) for branch in self.branches))


def make():
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Workload(model, nn.functional.mse_loss, optimizer, (torch.randn(64, 256), torch.randn(64, 4)))
"""


def test_the_launches_that_a_real_process_planned_are_kept_with_the_run_and_shown(tmp_path):
    """Which plan wins is made up here, since threads gain nothing; all else is as in earnest."""
    (tmp_path / "train.py").write_text(BRANCHES)
    planned = planned_by_a_child(f"{tmp_path}/train.py:make")
    check_planned(planned)

    class Scheduling(Machine):
        def measurement(self, number: int, job: Job) -> Measurement:
            timeline = planned if job.timeline and job.arms[-1].knobs == ON_STREAMS else None
            return super().measurement(number, job).model_copy(update={"timeline": timeline})

    with open_database(f"sqlite:///{tmp_path}/k.db") as database:
        machine = Scheduling(step_ms={words(ON_STREAMS): 5.0}, inapplicable=only("capture=step", "streams=4"))
        run, _ = carried_out(database, claimed(database), machine)
        with database.begin() as connection:
            _, secret = tokens.create(connection, "ada", (Scope.READ,))
        asking = {"authorization": f"Bearer {secret}"}
        app = create_app(database, ServerSettings())
        with TestClient(app, base_url="http://localhost:8537", headers=asking) as client:
            assert client.get(f"/api/v1/runs/{run.id}/trace").json() == trace_of(planned)
            exported = client.get(f"/api/v1/runs/{run.id}/export").json()
    assert exported["plan"]["knobs"] == ON_STREAMS
    assert Timeline.model_validate(exported["timeline"]) == planned


def planned_by_a_child(workload: str) -> Timeline:
    arms = (ArmSpec(name="eager"), ArmSpec(name="candidate", knobs=ON_STREAMS))
    found = outcome_of(Job(workload=workload, device="cpu", arms=arms, rounds=1, numerics=False, timeline=True))
    assert isinstance(found, Measurement), found
    assert found.timeline is not None
    return found.timeline


def check_planned(timeline: Timeline) -> None:
    assert 1 < timeline.streams <= 4
    assert {launch.stream for launch in timeline.launches} == set(range(timeline.streams))
    assert timeline.told.startswith(f"{len(timeline.launches)} launches on {timeline.streams} streams: ")
    assert any("addmm" in name for name in timeline.names)
    assert {"matrix products", "reductions"} <= {each.name for each in timeline.classes}
    assert all(each.floor_us <= each.total_us for each in timeline.classes)
    assert timeline.makespan_us < sum(launch.end_us - launch.begin_us for launch in timeline.launches)
    assert max(launch.used_bytes for launch in timeline.launches) > 64 * 256 * 4
    awaited = [(timeline.launches[other], launch) for launch in timeline.launches for other in launch.waits]
    assert awaited
    assert all(before.stream != after.stream and before.end_us <= after.begin_us for before, after in awaited)
