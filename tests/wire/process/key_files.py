"""A directory of keys, as `baton keys` makes it."""

from __future__ import annotations

from pathlib import Path

from wire.aio.port import new_key_pair
from wire.process.keys import KeyPair


def write(directory: Path, *names: str) -> dict[str, KeyPair]:
    pairs = {name: new_key_pair() for name in names}
    for name, pair in pairs.items():
        path = directory / f"{name}.key"
        path.write_text(pair.text())
        path.chmod(0o600)
    lines = [f"{pair.public} {name}\n" for name, pair in pairs.items()]
    (directory / "authorized_keys").write_text("# who is who\n\n" + "".join(lines))
    return pairs
