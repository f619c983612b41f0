"""Checks of keys, of the file of API keys, and of the TLS certificate."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from router.command.doctor.finding import Finding, fault, ok, warning
from router.config import Config
from wire.aio.port import public_key
from wire.aio.tls import server_context
from wire.process.api_keys import open_api_keys
from wire.process.keys import AUTHORIZED, Keys, credential, is_party
from wire.process.settings import ConfigError

# A certificate that expires sooner is a warning.
SOON: Final = timedelta(days=14)


def key_directory(config: Config) -> Path | None:
    """Return the directory of --keys, or of the systemd credentials; None without keys."""
    found = credential("router.key")
    return config.keys or (found.parent if found else None)


def check_keys(directory: Path | None, needed: Collection[str]) -> list[Finding]:
    """Check the keys in a directory; `needed` are the parties that will run on this machine."""
    if directory is None:
        return [ok("keys", "--keys", "none, so only this machine can connect")]
    present = {path.stem for path in directory.glob("*.key")}
    absent = sorted(set(needed) - present)
    if not directory.is_dir() or absent or not present:
        names = " ".join(absent or ["router", "prefill-0", "decode-0"])
        cure = f"baton keys {directory} {names}"
        return [fault("keys", str(directory), f"has no key of {names.replace(' ', ', ')}", cure)]
    found = [_check_key(directory, name) for name in sorted(present)]
    return [*found, *_check_modes(directory)]


def _check_key(directory: Path, name: str) -> Finding:
    """Check one key pair, and its line in the list of authorized keys."""
    path, listed = directory / f"{name}.key", directory / AUTHORIZED
    if not is_party(name):
        cure = f"mv {path} {directory}/NAME.key: router, prefill-RANK, decode-RANK or any-RANK"
        return warning("keys", str(path), "has no name of a router or worker: nobody uses it", cure)
    again = f"rm {path}; sed -i '/ {name}$/d' {listed}; baton keys {directory} {name}"
    try:
        keys = Keys(directory, name)
        keys.public_of("router")
    except ConfigError as error:
        is_open = path.exists() and path.stat().st_mode & 0o007
        copy = f"copy {AUTHORIZED} from the machine where baton keys was run to {directory}"
        cure = f"chmod 600 {path}" if is_open else again if str(path) in str(error) else copy
        return fault("keys", str(path), str(error), cure)
    public = keys.pair.public
    if public_key(keys.pair.secret) != public:
        what = "the secret key does not belong to the public key beside it: nobody can connect"
        return fault("keys", str(path), what, again)
    owner = keys.party(public)
    if owner == name:
        return ok("keys", str(path), f"is the key of {name} and authorized")
    what = f"{AUTHORIZED} has " + (f"this key as that of {owner}" if owner else "no such key")
    cure = f"echo '{public} {name}' >> {listed}, on every machine"
    return fault(
        "keys", str(path), what, f"sed -i '/ {owner}$/d' {listed}; {cure}" if owner else cure
    )


def _check_modes(directory: Path) -> list[Finding]:
    """Check that no other user can add keys, and that the keys belong to this one."""
    found = []
    for path in (directory, *directory.glob(AUTHORIZED)):
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH:
            what = f"mode {mode & 0o777:o}: every user here can add keys"
            found.append(fault("keys", str(path), what, f"chmod o-w {path}"))
    owners = {path.stat().st_uid for path in directory.glob("*.key")} - {os.geteuid()}
    if owners:
        what = f"belongs to user {min(owners)}, and this is user {os.geteuid()}"
        cure = "run baton doctor as the user of the service, or chown the keys to it"
        found.append(warning("keys", str(directory), what, cure))
    return found


def check_api_keys(config: Config) -> list[Finding]:
    """Check the files of API keys, of clients and of operators."""
    clients = "none, so everybody who reaches the router may use it"
    operators = (
        "none: without API keys and on a loopback address everybody here may restart workers, "
        "else nobody may"
    )
    return [
        _check_api_keys("api keys", "api_keys", config.api_keys, clients),
        _check_api_keys("admin keys", "admin_keys", config.admin_keys, operators),
    ]


def _check_api_keys(check: str, name: str, path: Path | None, without: str) -> Finding:
    where = str(path or credential(name) or f"--{name.replace('_', '-')}")
    try:
        keys = open_api_keys(path, name)
    except ConfigError as error:
        cure = f"chmod 600 {where}" if "chmod" in str(error) else f"baton keys --api-key {where}"
        return fault(check, where, str(error), cure)
    return ok(check, where, without if keys is None else "are valid")


def check_certificate(config: Config, now: datetime) -> Finding:
    """Check that certificate and key fit, and that the certificate is valid now."""
    if config.tls_cert is None:
        return ok("tls", "--tls-cert", "none, so clients send their keys and prompts in the clear")
    where = str(config.tls_cert)
    renew = f"put a new certificate into {where} and its key into {config.tls_key}, then restart"
    try:
        server_context(config.tls_cert, config.tls_key)
    except ConfigError as error:
        is_open = "chmod" in str(error)
        return fault("tls", where, str(error), f"chmod 600 {config.tls_key}" if is_open else renew)
    from cryptography.x509 import load_pem_x509_certificates

    first = load_pem_x509_certificates(config.tls_cert.read_bytes())[0]
    begins, ends = first.not_valid_before_utc, first.not_valid_after_utc
    if now > ends:
        return fault("tls", where, f"expired on {ends:%Y-%m-%d %H:%M} UTC", renew)
    if now < begins:
        what = f"is not valid before {begins:%Y-%m-%d %H:%M} UTC, and here it is {now:%F %H:%M}"
        return fault("tls", where, what, "timedatectl set-ntp true, if this clock is wrong")
    if ends - now < SOON:
        return warning("tls", where, f"expires on {ends:%Y-%m-%d %H:%M} UTC", renew)
    return ok("tls", where, f"is valid until {ends.astimezone(UTC):%Y-%m-%d}")
