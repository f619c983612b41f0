"""TLS for the two faces: one certificate, TLS 1.2 or newer."""

from __future__ import annotations

import ssl
from pathlib import Path

from wire.process.keys import read_secret
from wire.process.settings import ConfigError


def server_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return how to serve with this certificate chain and its key (PEM); None without.

    Raises:
        ConfigError: A file is missing, unreadable, readable by everybody, or does not fit.
    """
    if cert is None or key is None:
        return None
    read_secret(key)  # only to find what is wrong with it, in words
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(f"cannot use {cert} with {key}: {error.strerror or error}") from None
    return context
