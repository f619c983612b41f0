"""Executors by name, plug-ins included; a wrong name says what there is."""

import subprocess
import sys
from types import ModuleType

import pytest

from worker.executor import registry
from worker.executor.hash import HashExecutor


def test_hash_by_name() -> None:
    executor = registry.create("hash", model_name="m", fingerprint="f", max_model_len=99)
    assert isinstance(executor, HashExecutor)
    assert (executor.info.name, executor.info.max_model_len) == ("m", 99)


def test_the_hash_executor_never_loads_torch() -> None:
    script = (
        "import sys, worker.thread; from worker.executor.registry import create; create('hash');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_plug_in_is_called_with_the_same_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    module = ModuleType("plug_in")
    module.make = lambda **kwargs: seen.update(kwargs) or "executor"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plug_in", module)
    assert registry.create("plug_in:make", model_name="m", dtype="auto") == "executor"  # type: ignore[comparison-overlap]
    assert seen == {"model_name": "m", "dtype": "auto"}


@pytest.mark.parametrize("name", ["", "hsah", "json:", ":create", "no_such_module:create"])
def test_an_unknown_name_says_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="there are torch, hash, module:factory"):
        registry.create(name)


def test_a_module_without_the_factory_is_named() -> None:
    with pytest.raises(ValueError, match="json has no factory 'no_such'"):
        registry.create("json:no_such")


def test_a_plug_in_that_lacks_a_module_is_not_called_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def import_module(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(registry, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="scipy"):
        registry.create("plug_in:make")
