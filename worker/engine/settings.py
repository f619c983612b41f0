"""The settings of an engine; a worker has a flag for each, and --role sets `receives_kv`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker.engine.speculation import Drafter
from worker.executor.contract import Capabilities


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of a step, and optional features.

    Attributes:
        max_ubatch_tokens: The most tokens in one step; longer prompts are prefilled in chunks.
        max_sbatch_sequences: The most sequences that run at the same time.
        prefer_pure_decode: Alternate between steps that only decode and steps that only prefill.
        dynamic_batching: New sequences join running ones; else they wait until all have ended.
        ageing_s: One point of priority is worth this many seconds of waiting.
        prefix_cache: Keep the KV of ended sequences for others with the same prefix.
        swap_bytes: Host memory for the KV of preempted sequences; 0 recomputes it instead.
        speculate: "ngram:K", a drafter, or None.
        receives_kv: KV of other workers comes in, which limits the blocks of KV for others.
    """

    max_ubatch_tokens: int = 512
    max_sbatch_sequences: int = 256
    prefer_pure_decode: bool = False
    dynamic_batching: bool = True
    ageing_s: float = 1.0
    prefix_cache: bool = True
    swap_bytes: int = 0
    speculate: str | Drafter | None = None
    receives_kv: bool = False

    def __post_init__(self) -> None:
        for name in ("max_ubatch_tokens", "max_sbatch_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not at least 1")
        if not self.ageing_s > 0:
            raise ValueError(
                f"ageing_s is {self.ageing_s}, not over 0: low priorities would starve"
            )

    def within(self, capabilities: Capabilities) -> EngineSettings:
        """Return the settings without features that the executor lacks."""
        most = self.max_sbatch_sequences
        return replace(
            self,
            max_sbatch_sequences=min(most, capabilities.max_batch_sequences or most),
            dynamic_batching=self.dynamic_batching and capabilities.continuous_batching,
            speculate=self.speculate if capabilities.speculative else None,
        )
