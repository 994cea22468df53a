"""The campaign of benchmarks/reliability.py, small: workers killed as they claim, look at and finish the same runs."""

from pathlib import Path

import pytest

from benchmarks.audit import audited
from benchmarks.worker_kills import Campaign
from tests.unit.submission.steps import archive_of
from tuner.store.engine import open_database


@pytest.mark.timeout(300)  # 60 s on two idle cores
def test_three_workers_die_and_no_run_is_lost_or_counted_twice(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/queue.db"
    with open_database(url) as database:
        campaign = Campaign(tmp_path, url, database, archive_of("mlp"), trials=1, lease="3s", seats=2)
        try:
            campaign.submit(3)
            campaign.kill(3, seconds=150)
            campaign.drain()
            assert not campaign.survivors()
        finally:
            campaign.close()
        found = audited(database, campaign.acknowledged)
    assert len(campaign.hits) == 3
    assert found.faults == []
    assert found.finished + found.in_vain == len(campaign.acknowledged)
