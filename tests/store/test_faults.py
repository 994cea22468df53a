"""How a database is named where people and logs read of it."""

import pytest

from tuner.store.engine import create
from tuner.store.error_translation import shown


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://kitsune:hunter2@host:5433/db", "postgresql+psycopg://host:5433/db"),
        ("postgresql://kitsune:hunter2@/db?host=/run/pg", "postgresql+psycopg:///db"),
        ("postgresql://host/db?password=hunter2&sslmode=bogus", "postgresql+psycopg://host/db"),
        ("postgresql://[::1]:5433/db?sslpassword=hunter2", "postgresql+psycopg://[::1]:5433/db"),
        ("sqlite:////var/lib/kitsune.db", "sqlite:////var/lib/kitsune.db"),
    ],
)
def test_a_database_is_named_by_host_port_and_name_alone(url, expected):
    assert shown(create(url).url) == expected
