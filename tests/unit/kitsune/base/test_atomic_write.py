import os
import stat
import threading
from pathlib import Path

import pytest

from kitsune.base.atomic_write import write_whole


def test_what_is_there_is_replaced_and_nothing_else_is_left(tmp_path):
    for content in (b"one", b"two"):
        write_whole(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("place", ["write", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(place, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        write = fail

        def __init__(self, file):
            self.file = file

    (tmp_path / "file").write_bytes(b"old")
    if place == "replace":
        monkeypatch.setattr(os, "replace", fail)
    else:
        opened = Path.open
        monkeypatch.setattr(Path, "open", lambda path, mode: Full(opened(path, mode)))
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"new")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_new_file_has_the_mode_of_new_files_and_an_old_one_keeps_its_own(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    (tmp_path / "file").chmod(0o604)
    write_whole(tmp_path / "file", b"new")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o604


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")  # which is not there yet
    for content in (b"one", b"two"):
        write_whole(tmp_path / "link", content)
        assert (tmp_path / "folder" / "file").read_bytes() == content
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_links_in_a_circle_are_an_os_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(tmp_path / "a", b"")


def test_a_pipe_is_written_into(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"words")
    reader.join()
    assert read == [b"words"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_file_in_a_folder_of_others_is_written_in_place(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    number = (tmp_path / "file").stat().st_ino
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    write_whole(tmp_path / "file", b"new")
    assert ((tmp_path / "file").read_bytes(), (tmp_path / "file").stat().st_ino) == (b"new", number)


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "nowhere" / "plan.json", b"new")
    assert str(caught.value).endswith("nowhere/plan.json'")
