"""Certificates that work, and those that do not, by name."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest

from router.http.tls import server_context
from tests import certificate
from wire.process.settings import ConfigError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")


def test_none_is_plain() -> None:
    assert server_context(None, None) is None


def test_tls_is_new_enough(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    context = server_context(made.cert, made.key)
    assert context is not None and context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_what_does_not_work_is_named(tmp_path: Path) -> None:
    made = certificate.make(tmp_path)
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        server_context(made.cert, tmp_path / "nothing.pem")
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        server_context(tmp_path / "nothing.pem", made.key)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match="cannot use"):
        server_context(made.cert, certificate.make(other).key)
    made.key.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        server_context(made.cert, made.key)
