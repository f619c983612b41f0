"""`baton keys`: create the keys of a cluster, or an API key, without ever overwriting a key.

    baton keys DIR router prefill-0 decode-0     # a key pair for each router or worker
    baton keys --api-key FILE                    # one more API key for clients

DIR/NAME.key is the secret key of NAME, and DIR/authorized_keys the list of all public keys.  Run
this on one machine.  It prints which files to copy to which machine, but never a secret.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from router.command.operator import new_parser
from router.command.terminal import say
from wire.aio.port import new_key_pair
from wire.process.keys import AUTHORIZED, is_party


def write_new(path: Path, text: str) -> None:
    """Write a new file that only its owner can read, or none on error.  Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError as error:  # a full disk: a partial file would be taken for a key later
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def append(path: Path, text: str) -> None:
    """Append lines to a file, or none on error: a truncated line would corrupt the next one."""
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read(1) not in (b"", b"\n"):  # its last line has no newline
            text = f"\n{text}"
        try:
            if file.write(text.encode()) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            file.truncate(size)
            raise OSError(error.errno, error.strerror, str(path)) from None


def make_keys(directory: Path, names: list[str]) -> None:
    """Write a key pair for each name, or nothing on error."""
    if len(set(names)) < len(names):
        sys.exit("a party is named twice, and has one key")
    for name in names:
        if not is_party(name):
            sys.exit(f"{name!r} is no party: say router, prefill-RANK, decode-RANK or any-RANK")
        if (directory / f"{name}.key").exists():
            sys.exit(
                f"{directory / name}.key is there already and stays as it is; to replace it, "
                f"move it away and take its line out of {directory / AUTHORIZED}"
            )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    pairs, made = {name: new_key_pair() for name in names}, list[Path]()
    try:
        for name, pair in pairs.items():
            write_new(path := directory / f"{name}.key", pair.text())
            made.append(path)
        lines = [f"{pair.public} {name}\n" for name, pair in pairs.items()]
        append(directory / AUTHORIZED, "".join(lines))
    except OSError:  # a secret key without its line would block the next attempt
        for path in made:
            path.unlink()
        raise


def make_api_key(path: Path) -> None:
    """Append an API key to the file, creating it if necessary."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        write_new(path, "# API keys, one a line; take a line out to revoke it\n")
    append(path, f"sk-{secrets.token_urlsafe(32)}\n")
    say(f"one more key is the last line of {path}; start the router with --api-keys {path}")


def run(argv: Sequence[str]) -> int:
    """Write the keys that the arguments name; exit with a sentence if that fails."""
    parser = new_parser("keys", __doc__)
    parser.add_argument("--api-key", type=Path, metavar="FILE", help="add an API key to FILE")
    parser.add_argument("directory", nargs="?", metavar="DIR")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args(argv)
    try:
        if given.api_key is not None:
            if given.directory is not None:
                parser.error("keys of parties and an API key are made one after the other")
            make_api_key(given.api_key)
        elif not (given.directory and given.names):  # "" would mean the current directory
            parser.error("say DIR and the names of the parties, or --api-key FILE")
        else:
            make_keys(Path(given.directory), given.names)
            say(f"made in {given.directory}: {', '.join(given.names)}")
            for name in given.names:
                say(f"  machine of {name}: copy {name}.key and {AUTHORIZED}, start with --keys DIR")
            say(f"{AUTHORIZED} must be the same everywhere; a .key only where its party runs.")
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        sys.exit(f"{parser.prog}: cannot write{where}: {error.strerror}")
    return 0
