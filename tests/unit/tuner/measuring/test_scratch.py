import os

import pytest

from tuner.measuring.scratch import OWNER, scratch_beside, sweep


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


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
