"""The engine has the settings that the flags give."""

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.examples import own_model
from wire.process.settings import parse
from worker.assembly import make_engine
from worker.config import Config
from worker.engine.draft_model import ModelDrafter
from worker.engine.settings import EngineSettings
from worker.executor.hash import LAYOUT, create, create_mixed
from worker.executor.stepwise import StepwiseExecutor


def test_every_setting_of_an_engine_has_a_flag() -> None:
    flags = [
        *("--num-blocks=7", "--max-ubatch-tokens=9", "--max-sbatch-sequences=3", "--ageing-s=2"),
        *("--prefer-pure-decode", "--no-dynamic-batching", "--no-prefix-cache"),
        *("--swap-bytes=5", "--speculate=ngram:3"),
    ]
    default, chosen = EngineSettings(), make_engine(parse(Config, flags), create()).config
    untouched = [
        field.name
        for field in fields(EngineSettings)
        if getattr(chosen, field.name) == getattr(default, field.name)
    ]
    assert untouched == []


def test_the_defaults_of_the_flags_are_the_engine_s() -> None:
    config = make_engine(Config(num_blocks=7), create()).config
    assert replace(config, speculate=None, receives_kv=False) == EngineSettings()


@pytest.mark.parametrize(("role", "receives_kv"), [("prefill", 0), ("decode", 1), ("any", 1)])
def test_workers_that_receive_kv_limit_what_they_send(role: Any, *, receives_kv: bool) -> None:
    config = make_engine(Config(role=role, num_blocks=7), create()).config
    assert config.receives_kv == receives_kv


def test_a_draft_model_shares_the_memory_for_kv() -> None:
    num_bytes = 10 * 16 * LAYOUT.token_bytes
    config = Config(kv_cache_bytes=num_bytes, speculate="draft:3:demo")
    engine = make_engine(config, create(), create())
    drafter = engine.config.speculate
    assert isinstance(drafter, ModelDrafter) and drafter.num_drafts == 3
    assert engine.pool.num_blocks == drafter.pool.num_blocks == 5
    assert make_engine(Config(kv_cache_bytes=num_bytes), create()).pool.num_blocks == 10


@pytest.mark.parametrize("speculate", ["ngram:4", "draft:3:demo"])
def test_guesses_that_nobody_verifies_are_refused(speculate: str) -> None:
    executor = own_model.create()
    assert isinstance(executor, StepwiseExecutor)
    config = Config(num_blocks=4, executor="scripts.examples.own_model:create", speculate=speculate)
    with pytest.raises(
        ValueError, match=r"scripts\.examples\.own_model:create.*leave --speculate out"
    ):
        make_engine(config, executor)
    reader = Config(role="prefill", num_blocks=4, speculate=speculate)  # who guesses nothing
    assert make_engine(reader, executor).config.speculate is None


def test_a_draft_model_needs_the_vocabulary_of_the_model() -> None:
    config = Config(num_blocks=4, speculate="draft:3:demo")
    other = create()
    other.info = type(other.info)("other", "", 999, 64, frozenset(), LAYOUT)
    with pytest.raises(ValueError, match="vocabulary has 999 tokens"):
        make_engine(config, create(), other)


def test_a_draft_model_whose_state_cannot_go_back_is_refused() -> None:
    config = Config(num_blocks=4, speculate="draft:3:demo")
    with pytest.raises(ValueError, match=r"draft:3:demo.*keep a state.*take another one"):
        make_engine(config, create(), create_mixed())


def test_tiers_are_opened_as_the_flags_say(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_blocks": 4, "block_size": 2, "executor": "hash"}
    assert make_engine(Config(**sizes), create()).tiering is None
    config = Config(**sizes, host_kv_bytes=1000, disk_kv=tmp_path, disk_kv_bytes=5000, rank=3)
    engine = make_engine(config, create())
    assert engine.tiering is not None and engine.tiering.store.disk is not None
    slots = engine.tiering.store.disk.disk.num_slots
    assert engine.num_tier_blocks == slots + 1000 // (2 * LAYOUT.token_bytes)
    assert [path.parent.name for path in tmp_path.rglob("kv")] == ["decode-3"]
    engine.close_tiers(5.0)


def test_blocks_of_a_plug_in_that_was_changed_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "changing.py"
    module = ModuleType("changing")
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "changing", module)
    disk = tmp_path / "disk"
    config = Config(num_blocks=4, executor="changing:create", disk_kv=disk, disk_kv_bytes=5000)
    for content in ("1", "22", "1"):
        source.write_text(content)
        os.utime(source, (1, 1))
        make_engine(config, create()).close_tiers(5.0)
    assert len([*disk.iterdir()]) == 2
    source.unlink()
    with pytest.raises(ValueError, match=r"--disk-kv: .*No such file"):
        make_engine(config, create())


def test_host_memory_for_tiers_has_to_be_free() -> None:
    with pytest.raises(ValueError, match=f"--host-kv-bytes is {1 << 50}; .* are free; lower it"):
        make_engine(Config(num_blocks=4, host_kv_bytes=1 << 50), create())
