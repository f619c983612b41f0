"""Vectors of hashes: of prefixes of prompts, and of models."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from wire.prefix import prefix_hashes
from wire.process.model import fingerprint


def prefixes() -> list[dict[str, Any]]:
    cases: list[tuple[str, list[int], int]] = [
        ("no tokens", [], 16),
        ("less than a block", [1, 2, 3], 4),
        ("one block", [1, 2, 3, 4], 4),
        ("two blocks and a rest", [1, 2, 3, 4, 5, 6, 7, 8, 9], 4),
        ("blocks of one token", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1),
        ("the largest id", [4294967295, 0], 2),
        ("blocks of 16 tokens", list(range(40)), 16),
    ]
    return [
        {
            "name": name,
            "token_ids": token_ids,
            "block_size": block_size,
            "hashes": [f"{one:016x}" for one in prefix_hashes(token_ids, block_size)],
        }
        for name, token_ids, block_size in cases
    ]


# Name, what config.json and tokenizer.json hold, and the bytes of each file of weights.
MODELS: Final[list[tuple[str, dict[str, str], dict[str, int]]]] = [
    (
        "one file of weights",
        {"config.json": '{"model_type": "llama"}\n', "tokenizer.json": "{}"},
        {"model.safetensors": 1000},
    ),
    (
        "two files of weights, no tokenizer",
        {"config.json": '{"model_type": "qwen3"}\n'},
        {"model-00002-of-00002.safetensors": 7, "model-00001-of-00002.safetensors": 5_000_000},
    ),
]


def fingerprints() -> list[dict[str, Any]]:
    """Of directories made for it: fingerprints go by the names and sizes of weights only."""
    found = []
    for name, files, weights in MODELS:
        with TemporaryDirectory() as directory:
            for file, content in files.items():
                (Path(directory) / file).write_text(content)
            for file, size in weights.items():
                with (Path(directory) / file).open("wb") as sparse:
                    sparse.truncate(size)
            digest = fingerprint(Path(directory))
        found.append({"name": name, "files": files, "weights": weights, "fingerprint": digest})
    return found
