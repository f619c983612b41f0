"""Key files and the list of parties: valid and invalid lines, and changes of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.wire.process.key_files import write
from wire.aio.port import new_key_pair
from wire.process.keys import Keys, credential, is_party, open_keys, read_key_pair
from wire.process.settings import ConfigError


def test_a_party_has_its_secret_and_knows_the_others(tmp_path: Path) -> None:
    pairs = write(tmp_path, "router", "prefill-0")
    keys = Keys(tmp_path, "router")
    assert keys.pair == pairs["router"]
    assert keys.party(pairs["prefill-0"].public) == "prefill-0"
    assert keys.public_of("prefill-0") == pairs["prefill-0"].public
    assert keys.party(new_key_pair().public) is None


def test_secrets_are_not_in_reprs(tmp_path: Path) -> None:
    pair = write(tmp_path, "router")["router"]
    assert pair.secret not in repr(pair) + repr(vars(Keys(tmp_path, "router")))


def test_a_line_taken_out_is_a_key_revoked(tmp_path: Path) -> None:
    pairs = write(tmp_path, "router", "prefill-0")
    keys = Keys(tmp_path, "router")
    assert not keys.refresh()
    (tmp_path / "authorized_keys").write_text(f"{pairs['router'].public} router\n")
    assert keys.refresh() and not keys.refresh()
    assert keys.party(pairs["prefill-0"].public) is None


def test_a_link_finds_a_party_added_later(tmp_path: Path) -> None:
    write(tmp_path, "prefill-0", "decode-0")
    keys = Keys(tmp_path, "prefill-0")
    later = new_key_pair().public
    with (tmp_path / "authorized_keys").open("a") as lines:
        lines.write(f"{later} decode-1\n")
    assert keys.public_of("decode-1") == later


def test_a_line_without_sense_admits_nobody(tmp_path: Path) -> None:
    pairs = write(tmp_path, "router")
    keys = Keys(tmp_path, "router")
    other = new_key_pair().public
    lines = f"{other} admin\n{other[:-1]} prefill-0\n{other}\n{pairs['router'].public} router\n"
    (tmp_path / "authorized_keys").write_text(lines)
    with capture_logs() as logs:
        assert keys.refresh()
    assert [entry["line"] for entry in logs if "line" in entry] == [1, 2, 3]
    assert keys.party(other) is None and keys.party(other[:-1]) is None
    assert keys.party(pairs["router"].public) == "router"


def test_a_list_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    pairs = write(tmp_path, "router")
    keys = Keys(tmp_path, "router")
    (tmp_path / "authorized_keys").unlink()
    with capture_logs() as logs:
        assert not keys.refresh()
    assert [each["event"] for each in logs] == ["the list of keys stays as it was"]
    assert keys.party(pairs["router"].public) == "router"


def test_a_party_without_a_key_is_named(tmp_path: Path) -> None:
    write(tmp_path, "prefill-0")
    with pytest.raises(ConfigError, match=r"authorized_keys has no key of router: .*baton keys"):
        Keys(tmp_path, "prefill-0").public_of("router")


@pytest.mark.parametrize("text", ["", "public x\nsecret y\n", "\xff"])
def test_an_invalid_key_file_is_refused_without_being_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "router.key"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"router\.key is n"):
        read_key_pair(path)


def test_systemd_s_credentials_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert credential("router.key") is None and open_keys(None, "router") is None
    pairs = write(tmp_path, "router")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    keys = open_keys(None, "router")
    assert keys is not None and keys.pair == pairs["router"]
    assert open_keys(None, "prefill-0") is None
    with pytest.raises(ConfigError, match=r"^--keys: cannot read .*none/router.key"):
        open_keys(tmp_path / "none", "router")


@pytest.mark.parametrize("name", ["router", "prefill-0", "decode-4294967293"])
def test_parties(name: str) -> None:
    assert is_party(name)


@pytest.mark.parametrize("name", ["", "router-0", "prefill", "decode-01", "decode--1", "../router"])
def test_no_parties(name: str) -> None:
    assert not is_party(name)
