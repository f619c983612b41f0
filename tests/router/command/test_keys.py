"""`baton keys`: what it writes, what it prints, what it never does."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from router.command.keys import make_api_key, make_keys, write_new
from tests.cluster import ROOT
from tests.router.command.key_command import BATON_KEYS, keys
from wire.process.api_keys import ApiKeys, digest
from wire.process.keys import Keys


def test_each_party_gets_a_pair_that_the_others_know(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    names = ("router", "prefill-0", "decode-0")
    done = keys(directory, *names)
    assert done.returncode == 0, done.stderr
    for name in names:
        pair = Keys(directory, name).pair
        for other in names:
            assert Keys(directory, other).public_of(name) == pair.public
        assert stat.S_IMODE((directory / f"{name}.key").stat().st_mode) == 0o600
        assert f"copy {name}.key and authorized_keys" in done.stdout
        assert pair.secret not in done.stdout + done.stderr
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_adding_a_party_keeps_the_others_in_the_list(tmp_path: Path) -> None:
    listed, names = "", ("router", "prefill-0", "decode-0")
    for name in names:
        make_keys(tmp_path, [name])
        grown = (tmp_path / "authorized_keys").read_text()
        assert grown.startswith(listed) and grown.endswith(f" {name}\n")
        listed = grown
    assert listed.count("\n") == len(names)
    for name in names:
        assert Keys(tmp_path, "router").public_of(name) == Keys(tmp_path, name).pair.public


@pytest.mark.parametrize("names", [["router"], ["decode-0", "router"], ["router", "decode-0"]])
def test_an_existing_key_is_never_overwritten(tmp_path: Path, names: list[str]) -> None:
    make_keys(tmp_path, ["router"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    sentence = (
        r"router\.key is there already and stays as it is; .* its line out of .*authorized_keys"
    )
    with pytest.raises(SystemExit, match=sentence):
        make_keys(tmp_path, names)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_key_that_another_wrote_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    (path := tmp_path / "router.key").write_text("theirs")
    with pytest.raises(FileExistsError):
        write_new(path, "ours")
    assert path.read_text() == "theirs"


@pytest.mark.parametrize("name", ["admin", "../router", "decode-"])
def test_a_name_that_is_no_party_is_refused(tmp_path: Path, name: str) -> None:
    done = keys(tmp_path / "keys", "router", name)
    assert done.returncode == 1 and "no party" in done.stderr
    assert not (tmp_path / "keys").exists()


def test_api_keys_are_added_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "api_keys"
    done = [keys("--api-key", path) for _ in range(2)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = [line for line in path.read_text().splitlines() if line.startswith("sk-")]
    assert len(set(made)) == 2 and all(ApiKeys(path).allow(digest(key.encode())) for key in made)
    assert not any(key in one.stdout for key in made for one in done)


def test_where_nothing_can_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # no directory, so not even root can write below it
    below = tmp_path / "file" / "below"
    for done in (keys(below, "router"), keys("--api-key", below)):
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"baton keys: cannot write {tmp_path / 'file'}")


def test_a_list_that_cannot_be_added_to_leaves_no_key(tmp_path: Path) -> None:
    (tmp_path / "authorized_keys").mkdir()
    done = keys(tmp_path, "router")
    assert done.returncode == 1 and "authorized_keys: Is a directory" in done.stderr
    assert not (tmp_path / "router.key").exists()


def test_a_key_cut_by_a_full_disk_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)

    def opened(path: Path, *_: int) -> int:
        path.write_text("")  # what is cut is there
        return full

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(OSError, match=r"No space left on device.*router\.key"):
        write_new(tmp_path / "router.key", "public")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--api-key", "LIST"], ["HERE", "router", "decode-0"]])
@pytest.mark.parametrize("room", [0, 30])
def test_a_full_disk_leaves_the_list_as_it_was_and_no_key(
    tmp_path: Path, words: list[str], room: int
) -> None:
    path, before = tmp_path / "authorized_keys", f"# {'x' * 1000}\n"
    path.write_text(before)
    paths = {"LIST": str(path), "HERE": str(tmp_path)}
    limit = len(before) + room  # of any file: the keys of parties are smaller
    done = subprocess.run(
        [*BATON_KEYS, *[paths.get(it, it) for it in words]],
        capture_output=True,
        text=True,
        timeout=30,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1 and f"cannot write {path}: " in done.stderr
    assert {each: each.read_text() for each in tmp_path.iterdir()} == {path: before}


def test_both_kinds_of_keys_at_once_are_refused(tmp_path: Path) -> None:
    done = keys("--api-key", tmp_path / "api_keys", tmp_path / "keys", "router")
    assert done.returncode == 2 and "one after the other" in done.stderr
    assert not list(tmp_path.iterdir())


def test_without_an_installation_it_says_how_to_make_one(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHON": str(tmp_path / "python")}
    command = [str(ROOT / "scripts" / "keys"), str(tmp_path / "keys"), "router"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "run scripts/setup, or set PYTHON=" in done.stderr


def test_a_python_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "ours").symlink_to("/bin/echo")
    environ = os.environ | {"PYTHON": "ours", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(ROOT / "scripts" / "keys"), str(tmp_path / "keys"), "router"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.stdout == f"-m router.command keys {tmp_path / 'keys'} router\n"


def test_an_empty_directory_is_not_the_one_we_are_in(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "keys"), "", "router"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and "say DIR and the names" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_last_line_without_its_end_is_not_joined_by_the_next(tmp_path: Path) -> None:
    """An editor may leave it so."""
    make_keys(tmp_path, ["router"])
    listed = tmp_path / "authorized_keys"
    listed.write_text(listed.read_text().rstrip())
    make_keys(tmp_path, ["decode-0"])
    for name in ("router", "decode-0"):
        assert Keys(tmp_path, "router").public_of(name) == Keys(tmp_path, name).pair.public
    path = tmp_path / "api_keys"
    make_api_key(path)
    path.write_text(path.read_text().rstrip())
    make_api_key(path)
    made = [line for line in path.read_text().splitlines() if line.startswith("sk-")]
    assert len(made) == 2 and all(ApiKeys(path).allow(digest(key.encode())) for key in made)


def test_a_party_that_is_named_twice_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a party is named twice"):
        make_keys(tmp_path / "keys", ["router", "decode-0", "router"])
    assert not (tmp_path / "keys").exists()
