"""A pytest plug-in that runs vLLM's server tests against a cluster of ours.

It runs in a pytest of its own, where `tests` is vLLM's folder.  What those tests import of vLLM is
not there: `tests.utils` is this file's `RemoteOpenAIServer`, which starts `python -m router`; the
few functions that look a model up find the demo model; every other name of vLLM is a placeholder
that may be imported and raises `NotOurs` when it is used, for a test that uses vLLM's own classes
does not test a server.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import anthropic
import openai
import pytest
import transformers

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "wire" / "demo"
RESULTS = Path(os.environ["VLLM_TESTS_RESULTS"])
# Pattern of a test's id, why it cannot apply.
RULES = [(re.compile(one), why) for one, why in json.loads(os.environ["VLLM_TESTS_RULES"])]
KEY = "token-abc123"

# Of vLLM's server, with the number of their values: flags that choose how its engine computes, that
# belong to the model that is not the one served here, or that switch on what is always on here.
NEUTRAL = {
    "--dtype": 1,
    "--enforce-eager": 0,
    "--gpu-memory-utilization": 1,
    "--load-format": 1,
    "--max-cpu-loras": 1,
    "--max-logprobs": 1,
    "--max-lora-rank": 1,
    "--max-model-len": 1,
    "--max-num-batched-tokens": 1,
    "--max-num-seqs": 1,
    "--chat-template": 1,
    "--revision": 1,
    "--tokenizer": 1,
    "--seed": 1,
    "--structured-outputs-config.backend": 1,
    "--trust-remote-code": 0,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-server-load-tracking": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--skip-tokenizer-init": 0,
    "--lora-modules": 1,
    "--limit-mm-per-prompt": 1,
    "--runner": 1,
    "--no-enable-prefix-caching": 0,
}
# Flags that are ours as well, once `python -m router --help` names them.
SHARED = ("--served-model-name", "--tool-call-parser", "--reasoning-parser")


class NotOurs(Exception):
    """The test uses a class of vLLM, or a flag of its server."""


class _Placeholder(type):
    """A class that stands for any name of a module that is not there."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _placeholder(name, cls.__module__)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotOurs(f"uses {cls.__module__}.{cls.__name__}, a class of vLLM")

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __getitem__(cls, _: Any) -> Any:
        return cls

    __add__ = __sub__ = __call__


def _placeholder(name: str, module: str) -> Any:
    """An exception, so that a test may say that it expects it."""
    return _Placeholder(name, (Exception,), {"__module__": module})


class _Missing(ModuleType):
    """A module that is not there: every name is a placeholder."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in REAL:
            return importlib.import_module(f"{self.__name__}.{name}")
        return _placeholder(name, self.__name__)


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: False


class _ModelConfig:
    def __init__(self, **_: Any) -> None:
        """Whatever model is asked for, it is the demo model's."""

    def get_vocab_size(self) -> int:
        return int(json.loads((DEMO / "config.json").read_text())["vocab_size"])


class _Hub:
    def snapshot_download(self, *_: Any, **__: Any) -> str:
        return str(DEMO)


def _tokenizer(*_: Any, **__: Any) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(DEMO)


# What the tests may really use of vLLM's modules.
REAL: dict[str, dict[str, Any]] = {
    "vllm.config": {"ModelConfig": _ModelConfig},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.tokenizers": {"get_tokenizer": _tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
    "vllm.version": {"__version__": "0.32.0"},
    "vllm.model_executor.model_loader.weight_utils": {
        "download_weights_from_hf": lambda *_, **__: str(DEMO)
    },
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM, and what only its own environment has."""

    TOPS = ("vllm", "fastapi", "openai_harmony", "pybase64", "rapidfuzz", "outlines_core")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.TOPS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Missing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in REAL.get(module.__name__, {}).items():
            setattr(module, name, value)


def _cluster_type() -> Any:
    """`tests/cluster.py` of this project; the name `tests` is vLLM's here."""
    spec = importlib.util.spec_from_file_location("baton_cluster", ROOT / "tests" / "cluster.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(ROOT))
    spec.loader.exec_module(module)
    return module.Cluster


class _Running:
    """The one cluster that runs at a time; the next with other flags takes its place."""

    def __init__(self) -> None:
        self._type = _cluster_type()
        self._flags: tuple[str, ...] | None = None
        self._cluster: Any = None
        help_text = os.popen(f"{sys.executable} -m router --help 2>&1").read()
        self.known = tuple(flag for flag in SHARED if flag in help_text)

    def start(self, flags: tuple[str, ...]) -> str:
        if flags != self._flags:
            self.stop()
            directory = Path(tempfile.mkdtemp(prefix="baton-vllm-tests-"))
            self._cluster = self._type(directory, args=flags)
            self._cluster.__enter__()
            self._flags = flags
        url: str = self._cluster.http
        return url

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.__exit__()
        self._cluster = self._flags = None


RUNNING = _Running()


def _flags(model: str, args: Sequence[str]) -> tuple[str, ...]:
    """Our flags for vLLM's.

    Raises:
        NotOurs: one that only vLLM's server has.
    """
    ours = {"--served-model-name": model}
    rest = [part for arg in args for part in (arg.split("=", 1) if "--" in arg else [arg])]
    while rest:
        flag = rest.pop(0).replace("_", "-")
        if flag in SHARED:
            value = rest.pop(0)
            if flag in RUNNING.known:
                ours[flag] = value
        elif flag == "--api-key":
            with tempfile.NamedTemporaryFile("w", prefix="baton-keys-", delete=False) as file:
                file.write(rest.pop(0))
            ours["--api-keys"] = file.name
        elif flag in NEUTRAL:
            del rest[: NEUTRAL[flag]]
        else:
            raise NotOurs(f"its server has the flag {flag} of vLLM's")
    return tuple(part for pair in ours.items() for part in pair)


class RemoteOpenAIServer:
    """Our cluster under the name of the server class in vLLM's tests."""

    DUMMY_API_KEY = KEY
    uds = None
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_: Any) -> None:
        self.url_root = RUNNING.start(_flags(model, vllm_serve_args))
        self.host = "127.0.0.1"
        self.port = int(self.url_root.rpartition(":")[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """It goes on for the next test file that wants the same."""

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options("v1", options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options("v1", options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options("", options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options("", options))

    def _options(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        base_url = f"{self.url_root}/{path}".rstrip("/")
        return {"base_url": base_url, "api_key": KEY, "max_retries": 0, "timeout": 120} | options


def _stand_in() -> None:
    sys.meta_path.insert(0, _Finder())
    utils = _Missing("tests.utils")
    for name, value in {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_EXTRA_ARGS": [],
        "ROCM_ENV_OVERRIDES": {},
        "VLLM_PATH": Path(),
        "multi_gpu_only": lambda **_: pytest.mark.skip(reason="several GPUs"),
        "requires_fp8": pytest.mark.skip(reason="a GPU with FP8"),
    }.items():
        setattr(utils, name, value)
    sys.modules["tests.utils"] = utils
    sys.modules["tests.conftest"] = _Missing("tests.conftest")
    transformers.AutoTokenizer.from_pretrained = _tokenizer


_stand_in()


# What pytest calls.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        vars(item)["_nodeid"] = item.nodeid  # which schemathesis reads, and pytest has no more
        for pattern, why in RULES:
            if pattern.search(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=why))
                break


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, NotOurs):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {error}")
    if report.when == "call" or report.outcome != "passed":
        if report.when != "teardown":
            _write(item.nodeid, report, error)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, report, None)


def pytest_unconfigure() -> None:
    RUNNING.stop()


def _write(test: str, report: Any, error: BaseException | None) -> None:
    why = ""
    if report.outcome == "skipped":
        why = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.outcome == "failed":
        why = f"{type(error).__name__}: {error}" if error else str(report.longrepr)[-600:]
    with RESULTS.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": report.outcome, "why": why[:600]}) + "\n")
