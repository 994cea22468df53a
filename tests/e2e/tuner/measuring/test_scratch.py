"""What a killed process left behind is swept."""

import subprocess
import sys
from pathlib import Path

from tests.unit.tuner.measuring.test_scratch import temporary  # noqa: F401
from tuner.measuring.scratch import sweep

OWNING = """
import sys, tempfile, time
from pathlib import Path
from tuner.measuring.scratch import scratch_beside
tempfile.tempdir = sys.argv[1]
with scratch_beside(Path(sys.argv[1]) / "compiled") as folder:
    (folder / "job.json").write_text("{}")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_worker_left_is_swept_and_what_a_living_one_has_stays(temporary):  # noqa: F811
    with subprocess.Popen([sys.executable, "-c", OWNING, str(temporary)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        sweep()
        assert (folder / "job.json").exists(), "its owner lives"
        owner.kill()
    assert (folder / "job.json").exists(), "nobody was left to remove it"
    (temporary / "compiled" / "kept").write_text("5 s of work")
    sweep()
    assert [path.name for path in temporary.iterdir()] == ["compiled"]
    assert (temporary / "compiled" / "kept").exists(), "a link was followed"
