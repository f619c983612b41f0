"""Keys and certificates that are no fault, or only seldom one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from router.command.doctor.access import check_api_keys, check_certificate, check_keys
from router.config import Config
from tests.certificate import make
from wire.aio.port import new_key_pair


def test_a_certificate_is_judged_by_the_time(tmp_path: Path) -> None:
    made, now = make(tmp_path), datetime.now(UTC)
    made.key.chmod(0o600)
    config = Config(tls_cert=made.cert, tls_key=made.key)
    found = [check_certificate(config, now + timedelta(days=days)) for days in (-20, 1, 3)]
    assert [each.level for each in found] == ["fault", "warning", "fault"]
    assert "set-ntp" in found[0].cure and "expired" in found[2].what
    made.key.chmod(0o644)
    assert "chmod 600" in check_certificate(config, now).cure


def test_whole_keys_and_a_key_that_another_party_has(tmp_path: Path) -> None:
    pairs = {name: new_key_pair() for name in ("router", "decode-0")}
    for name, pair in pairs.items():
        (tmp_path / f"{name}.key").write_text(pair.text())
        (tmp_path / f"{name}.key").chmod(0o600)
    lines = [f"{pair.public} {name}\n" for name, pair in pairs.items()]
    (tmp_path / "authorized_keys").write_text("".join(lines))
    assert [each.level for each in check_keys(tmp_path, ["router"])] == ["ok", "ok"]
    (tmp_path / "decode0.key").write_text(pairs["router"].text())
    misnamed = check_keys(tmp_path, ["router"])[1]
    assert misnamed.level == "warning" and "decode-RANK" in misnamed.cure
    (tmp_path / "decode0.key").unlink()
    lines[1] = f"{pairs['decode-0'].public} decode-1\n"
    (tmp_path / "authorized_keys").write_text("".join(lines))
    found = check_keys(tmp_path, ["router"])
    assert [each.level for each in found] == ["fault", "ok"]
    assert "as that of decode-1" in found[0].what and "sed -i '/ decode-1$/d'" in found[0].cure
    (tmp_path / "authorized_keys").unlink()
    assert "copy authorized_keys" in check_keys(tmp_path, ["router"])[1].cure


def test_the_keys_of_operators_are_checked_as_those_of_clients(tmp_path: Path) -> None:
    good, short = tmp_path / "good", tmp_path / "short"
    for path, key in ((good, "sk-0123456789abcdef"), (short, "sk-1")):
        path.write_text(key + "\n")
        path.chmod(0o600)
    found = check_api_keys(Config(api_keys=good, admin_keys=short))
    assert [each.level for each in found] == ["ok", "fault"]
    assert found[1].where == str(short) and str(short) in found[1].cure
    assert [each.level for each in check_api_keys(Config())] == ["ok", "ok"]
