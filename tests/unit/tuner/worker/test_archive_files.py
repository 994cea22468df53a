import hashlib
import stat

import pytest

from kitsune.errors import ArchiveError, UnfitError
from tuner.worker.archive_files import archive_file

CONTENT = b"an archive"
NAME = hashlib.sha256(CONTENT).hexdigest()


def test_an_archive_becomes_a_file_of_this_user_alone(tmp_path):
    path = archive_file(tmp_path / "home", NAME, CONTENT)
    assert path == tmp_path / "home" / "archives" / f"{NAME}.ksn"
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_was_there_is_replaced_whole(tmp_path):
    path = archive_file(tmp_path, NAME, CONTENT)
    path.write_bytes(b"cut o")
    with path.open("rb") as reader:
        assert archive_file(tmp_path, NAME, CONTENT) == path
        assert reader.read() == b"cut o", "who reads the old file goes on reading it"
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [None, b"another archive"])
def test_bytes_of_another_name_are_refused(tmp_path, content):
    with pytest.raises(ArchiveError, match=NAME):
        archive_file(tmp_path, NAME, content)
    assert list(tmp_path.iterdir()) == []


def test_a_name_leads_nowhere_else(tmp_path):
    with pytest.raises(ArchiveError):
        archive_file(tmp_path / "home", "../../escape", CONTENT)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_refuses_makes_the_machine_unfit(tmp_path):
    (tmp_path / "archives").write_text("not a folder")
    with pytest.raises(UnfitError, match="KITSUNE_HOME"):
        archive_file(tmp_path, NAME, CONTENT)
