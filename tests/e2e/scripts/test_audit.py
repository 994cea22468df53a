"""The real pip-audit without a network."""

import pytest

from scripts import audit


@pytest.mark.minutes
def test_without_a_network_pip_audit_ends_as_foreseen(monkeypatch, capsys, tmp_path):
    """The real one, behind a proxy that is not there."""
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AUDIT_STRICT", raising=False)
    assert audit.main() == 0
    assert "NOT CHECKED" in capsys.readouterr().err
