"""Who may come in, who is turned away, and what is said of it: a step's first outputs.

The messages of refusals are read by clients.
"""

from __future__ import annotations

from wire.errors import ErrorCode
from wire.options import Options
from worker.engine.blocks import BlockPool
from worker.engine.outputs import Failed, Output, Reserved, Started
from worker.engine.plan import Plan
from worker.engine.sequence import Sequence
from worker.executor.contract import ModelInfo

Problem = tuple[ErrorCode, str]


def find_problem(
    sequence: Sequence, info: ModelInfo, pool: BlockPool, extra_tokens: int = 0
) -> Problem | None:
    """Say why neither the model nor, with so many tokens more, the empty pool can serve it."""
    problem = sequence.problem(info.vocab_size, info.max_model_len)
    if problem is None and not pool.can_ever_fit(sequence.num_tokens + extra_tokens):
        problem = _out_of_blocks(sequence, pool)
    return problem


def bind(sequence: Sequence, info: ModelInfo) -> None:
    """Have the model's EOS tokens and context end the sequence, besides what its options say."""
    options = sequence.options
    eos = frozenset[int]() if options.ignore_eos else info.eos_token_ids
    sequence.stop_ids = eos.union(options.stop_token_ids)
    sequence.max_len = min(sequence.max_len, info.max_model_len)


def resume(
    sequence: Sequence, token_ids: list[int], options: Options, max_new_tokens: int | None
) -> Problem | None:
    """Continue a reservation with these tokens, or say why they are not its continuation."""
    try:
        sequence.resume(token_ids, options, max_new_tokens)
    except ValueError as error:
        return ErrorCode.INVALID_REQUEST, str(error)
    return None


def tell(plan: Plan, pool: BlockPool) -> list[Output]:
    """Say who got blocks and who failed while the plan was made."""
    outputs: list[Output] = [Started(*_allocation(sequence)) for sequence in plan.started]
    outputs += [Reserved(*_allocation(sequence)) for sequence in plan.reserved]
    outputs += [Failed(s.request_id, *_out_of_blocks(s, pool)) for s in plan.failed]
    outputs += [Failed(s.request_id, *overdue(s.options)) for s in plan.overdue]
    return outputs


def overdue(options: Options) -> Problem:
    """Say that the deadline of the options has passed."""
    # What the client asked for, less what had passed when the request came here.
    message = f"not finished within the {options.deadline_ms} ms that its deadline_ms left"
    return ErrorCode.DEADLINE_EXCEEDED, message


def _allocation(sequence: Sequence) -> tuple[int, tuple[int, ...], int]:
    return sequence.request_id, tuple(sequence.block_table), sequence.num_cached_tokens


def _out_of_blocks(sequence: Sequence, pool: BlockPool) -> Problem:
    room = f"{pool.num_blocks} blocks of {pool.block_size} tokens"
    message = f"{sequence.num_tokens} tokens do not fit this worker's {room}"
    return ErrorCode.OUT_OF_BLOCKS, message
