import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.measuring.scratch import OWNER, scratch_beside, sweep

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


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_what_a_killed_worker_left_is_swept_and_what_a_living_one_has_stays(temporary):
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


def test_what_this_process_uses_is_not_swept(temporary):
    with scratch_beside(temporary / "compiled") as folder:
        sweep()
        assert (folder / OWNER).exists()
    assert not folder.exists()


def abandoned(folder):
    folder.mkdir()
    (folder / OWNER).touch()
    (folder / "job.json").touch()
    return folder


def test_the_folders_of_others_are_not_swept(temporary, tmp_path, monkeypatch):
    """Those of another name, those without our mark, links, links as marks, and those of another user."""
    abandoned(temporary / "another-1")
    (temporary / "kitsune-unmarked").mkdir()
    elsewhere = abandoned(tmp_path / "elsewhere")
    (temporary / "kitsune-link").symlink_to(elsewhere)
    (temporary / "kitsune-linked").mkdir()
    (temporary / "kitsune-linked" / OWNER).symlink_to(elsewhere / OWNER)
    (temporary / "kitsune-file").touch()
    before = sorted(temporary.rglob("*"))
    sweep()
    assert sorted(temporary.rglob("*")) == before
    assert (elsewhere / "job.json").exists()
    stale = abandoned(temporary / "kitsune-stale")
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: stale.stat().st_uid + 1)
        sweep()
    assert stale.exists()
    sweep()
    assert not stale.exists()
