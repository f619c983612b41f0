"""The settings of an engine; a worker has a flag of the same name for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker.engine.batch import BatchConfig
from worker.engine.speculation import Drafter
from worker.executor.contract import Capabilities


@dataclass(frozen=True, slots=True)
class EngineSettings(BatchConfig):
    """What may be chosen besides the number and the size of the blocks.

    Attributes:
        prefix_cache: Keep the KV of ended sequences for others that begin alike.
        swap_bytes: Host memory for the KV of preempted sequences; 0 for none, they are recomputed.
        speculate: Who guesses tokens: "ngram:K", a drafter, or nobody.
    """

    prefix_cache: bool = True
    swap_bytes: int = 0
    speculate: str | Drafter | None = None

    def within(self, capabilities: Capabilities) -> EngineSettings:
        """Return the settings without what an executor cannot do."""
        return replace(
            self,
            max_sbatch_sequences=capabilities.at_most(self.max_sbatch_sequences),
            dynamic_batching=self.dynamic_batching and capabilities.continuous_batching,
            speculate=self.speculate if capabilities.speculative else None,
        )
