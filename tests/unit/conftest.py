"""What unit tests of several rooms ask for."""

import pytest

from kitsune.cli import main


@pytest.fixture
def call(capsys):
    """Runs a command line; gives its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main.run(words)
        return code, *capsys.readouterr()

    return run
