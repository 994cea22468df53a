"""Archives, on SQLite and on PostgreSQL alike: bytes under their SHA-256, written once."""

from hashlib import sha256

from sqlalchemy import func, select

from kitsune.submission.format.archive import Archive
from tests.store.samples import OTHER_BATCH, OTHER_LOSS, OTHER_MODEL, START, after, an_archive
from tuner.store import tables
from tuner.store.database import Database
from tuner.store.queries import archives
from tuner.store.queries.archives import StoredArchive


class TestArchives:
    def test_an_archive_comes_back_as_it_was(self, database: Database) -> None:
        archive = an_archive()
        content = archive.to_bytes()
        with database.begin() as connection:
            stored, is_new = archives.put(connection, content, archive, now=START)
        assert is_new
        assert stored == StoredArchive(
            sha256=sha256(content).hexdigest(),
            size_bytes=len(content),
            fingerprint=archive.fingerprint,
            model_fingerprint=archive.model_fingerprint,
            created_at=START,
        )
        with database.read() as connection:
            assert archives.get(connection, stored.sha256) == stored
            found = archives.content(connection, stored.sha256)
        assert type(found) is bytes
        assert found == content
        assert Archive.from_bytes(found) == archive

    def test_every_byte_is_kept(self, database: Database) -> None:
        content = bytes(range(256)) * 4096
        with database.begin() as connection:
            stored, _ = archives.put(connection, content, an_archive())
            assert archives.content(connection, stored.sha256) == content
        assert stored.size_bytes == len(content)

    def test_an_archive_is_written_once(self, database: Database) -> None:
        archive = an_archive()
        with database.begin() as connection:
            first, _ = archives.put(connection, archive.to_bytes(), archive, now=START)
        with database.begin() as connection:
            again, is_new = archives.put(connection, archive.to_bytes(), archive, now=after(9))
            assert connection.scalar(select(func.count()).select_from(tables.archives)) == 1
        assert (again, is_new) == (first, False)

    def test_archives_are_kept_apart_by_their_bytes(self, database: Database) -> None:
        changes = ((), OTHER_BATCH, OTHER_LOSS, OTHER_MODEL)
        with database.begin() as connection:
            made = [archives.put(connection, archive.to_bytes(), archive) for archive in map(an_archive_of, changes)]
            assert connection.scalar(select(func.count()).select_from(tables.archives)) == len(changes)
        assert all(is_new for _, is_new in made)
        plain, other_batch, other_loss, other_model = (stored for stored, _ in made)
        assert plain.fingerprint == other_batch.fingerprint != other_loss.fingerprint
        assert plain.model_fingerprint == other_loss.model_fingerprint != other_model.model_fingerprint

    def test_what_is_not_there_is_none(self, database: Database) -> None:
        with database.read() as connection:
            assert archives.get(connection, "0" * 64) is None
            assert archives.content(connection, "0" * 64) is None


def an_archive_of(change: tuple[object, ...]) -> Archive:
    return an_archive(*change)
