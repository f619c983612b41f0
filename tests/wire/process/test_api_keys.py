"""API keys: valid keys, invalid files, and changes of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from wire.process.api_keys import ApiKeys, bearer, digest, open_api_keys
from wire.process.settings import ConfigError

ONE, TWO = "sk-" + "1" * 40, "sk-" + "2" * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "api_keys"
    path.write_text(f"# ours\n{ONE}\n\n  {TWO}\n")
    path.chmod(0o600)
    return path


def test_every_line_is_a_key(path: Path) -> None:
    keys = ApiKeys(path)
    assert keys.allow(digest(ONE.encode())) and keys.allow(digest(TWO.encode()))


@pytest.mark.parametrize("given", ["", "# ours", ONE[:-1], ONE + " ", ONE + TWO, ONE.upper()])
def test_nothing_else_is(path: Path, given: str) -> None:
    assert not ApiKeys(path).allow(digest(given.encode()))
    assert not ApiKeys(path).allow(given.encode())


def test_the_keys_of_another_file_are_valid_too(path: Path, tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.write_text("sk-" + "3" * 40)
    clients.chmod(0o600)
    keys = ApiKeys(clients, beside=ApiKeys(path))
    assert keys.allow(digest(ONE.encode())) and keys.allow(digest(b"sk-" + b"3" * 40))
    assert not ApiKeys(path).allow(digest(b"sk-" + b"3" * 40))


def test_a_key_is_revoked_and_another_added_without_a_restart(path: Path) -> None:
    keys = ApiKeys(path)
    path.write_text(f"{TWO}\n")
    assert not keys.allow(digest(ONE.encode()))
    path.write_text(f"{TWO}\n{ONE}\n")
    assert keys.allow(digest(ONE.encode()))


@pytest.mark.parametrize("end", ["gone", "empty", "open to all"])
def test_a_file_that_cannot_be_trusted_any_more_admits_nobody(path: Path, end: str) -> None:
    keys = ApiKeys(path)
    if end == "gone":
        path.unlink()
    elif end == "empty":
        path.write_text("")
    else:
        path.write_text(f"{ONE}\n{TWO}\n\n")
        path.chmod(0o644)
    with capture_logs() as logs:
        assert not keys.allow(digest(ONE.encode()))
    assert [each["event"] for each in logs] == ["no API key is valid now"]


@pytest.mark.parametrize(
    ("text", "mode", "sentence"),
    [
        ("# none\n", 0o600, "holds no API key"),
        ("short\n", 0o600, "fewer than 16 characters"),
        (ONE, 0o604, "chmod 600"),
        (None, 0, "cannot read"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_name(
    tmp_path: Path, text: str | None, mode: int, sentence: str
) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=sentence) as caught:
        ApiKeys(path)
    assert str(path) in str(caught.value) and "short" not in str(caught.value)
    with pytest.raises(ConfigError, match=f"^--admin-keys: .*{sentence}"):
        open_api_keys(path, "admin_keys")


def test_a_salt_depends_on_the_key_and_on_the_request_and_is_the_same_on_every_router(
    path: Path,
) -> None:
    salts = {
        (key, requested): ApiKeys(path).cache_salt(digest(key.encode()), requested)
        for key in (ONE, TWO)
        for requested in ("", "a", "ü" * 128)
    }
    assert len(set(salts.values())) == len(salts)
    assert salts == {
        (key, requested): ApiKeys(path).cache_salt(digest(key.encode()), requested)
        for key, requested in salts
    }
    assert salts[ONE, ""] == "8c2e382aba9091bac6701720a04afefd2a256cbd516f6343e4cdfadef39514ca"
    shared = ApiKeys(path, shares_prefixes=True)
    assert [shared.cache_salt(digest(ONE.encode()), each) for each in ("", "a")] == ["", "a"]


def test_only_digests_are_kept(path: Path) -> None:
    assert ONE not in repr(vars(ApiKeys(path)))


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (None, b""),
        (b"Bearer abc", b"abc"),
        (b"bearer  abc ", b"abc"),
        (b"Basic abc", b""),
        (b"abc", b""),
        (b"Bearer", b""),
    ],
)
def test_the_header(header: bytes | None, key: bytes) -> None:
    assert bearer(header) == key


def test_systemd_s_credential_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert open_api_keys(None) is None
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(path.parent))
    keys = open_api_keys(None)
    assert keys is not None and keys.allow(digest(ONE.encode()))
