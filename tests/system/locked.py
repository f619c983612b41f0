"""A cluster with keys and API keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.cluster import Cluster
from tests.router.command.key_command import keys as scripts_keys
from wire.process.keys import KeyPair, read_key_pair

PARTIES = ("router", "prefill-0", "decode-0", "decode-1", "decode-2")


class Locked(Cluster):
    """A cluster with keys and API keys."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.keys, self.api_keys = directory / "keys", directory / "api_keys"
        scripts_keys(self.keys, *PARTIES)
        scripts_keys("--api-key", self.api_keys)
        scripts_keys("--api-key", self.api_keys)
        self.comment, self.key, self.other_key = self.api_keys.read_text().splitlines()
        args = ("--keys", str(self.keys), "--api-keys", str(self.api_keys), *flags)
        super().__init__(directory, executor="hash", args=args, api_key=self.key)

    def pair(self, name: str) -> KeyPair:
        return read_key_pair(self.keys / f"{name}.key")

    @property
    def secrets(self) -> list[str]:
        return [self.key, self.other_key, *(self.pair(name).secret for name in PARTIES)]

    def complete(self, key: str, prompt: Sequence[int] = (1, 2, 3)) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"model": "demo", "prompt": [*prompt], "max_tokens": 4, "baton_usage": True}
        return httpx.post(
            f"{self.http}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60
        )
