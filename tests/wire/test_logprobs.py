"""A prompt's logprobs: packed, unpacked, bounded, and no surprise whatever the bytes."""

from __future__ import annotations

from math import inf, nan
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import RemoteProtocolError
from wire.logprobs import (
    LEAST_LOGPROB,
    MAX_PROMPT_LOGPROBS_BYTES,
    Logprobs,
    check_prompt_logprobs,
    join_prompt_logprobs,
    largest_top_token_id,
    pack_logprobs,
    prompt_logprobs_problem,
    unpack_prompt_logprobs,
)
from wire.payloads import PrefillResult, decode_prefill_result, encode_prefill_result
from wire.stream import MAX_SMALL_FRAME_BYTES

LOGPROB = st.floats(min_value=LEAST_LOGPROB, max_value=0, width=32, allow_nan=False)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[Logprobs]]:
    num_top = draw(st.integers(0, 20))
    pair = st.tuples(st.integers(0, 2**32 - 1), LOGPROB)
    top = st.lists(pair, min_size=num_top, max_size=num_top).map(tuple)
    rows = st.builds(Logprobs, logprob=LOGPROB, top=top)
    return num_top, draw(st.lists(rows, max_size=5))


@given(prompts())
def test_rows_come_back_as_they_were(prompt: tuple[int, list[Logprobs]]) -> None:
    num_top, rows = prompt
    packed = join_prompt_logprobs(num_top, map(pack_logprobs, rows))
    assert unpack_prompt_logprobs(memoryview(packed)) == rows
    result = PrefillResult(token_id=4, prompt_logprobs=packed)
    assert decode_prefill_result(encode_prefill_result(result)) == result
    ids = [token_id for row in rows for token_id, _ in row.top]
    assert largest_top_token_id(packed) == max(ids, default=-1)


@given(st.binary(max_size=80))
def test_any_bytes_are_rows_or_refused(packed: bytes) -> None:
    try:
        rows = unpack_prompt_logprobs(packed)
    except RemoteProtocolError:
        return
    assert len(packed) == 4 + sum([4 + 8 * len(row.top) for row in rows])


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\0\0\0",
        pack("<If", 1, -1.0),
        pack("<II", 2**32 - 1, 0),
        pack("<If" + 21 * "If", 21, -1.0, *21 * (7, -1.0)),
        pack("<Iff", 0, -1.0, nan),
        pack("<Iff", 0, -inf, -1.0),
        pack("<If", 0, 3e38),
        pack("<IfIffIf", 1, -1.0, 7, -1.0, -1.0, 7, nan),
    ],
)
def test_invalid_rows_are_refused(packed: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="prompt_logprobs"):
        check_prompt_logprobs(packed)
    with pytest.raises(RemoteProtocolError, match="prompt_logprobs"):
        decode_prefill_result(
            pack("<q", 5) + b"\x81\xafprompt_logprobs\xc4" + bytes((len(packed),)) + packed
        )


def test_a_limit_that_fits_the_frame() -> None:
    assert MAX_PROMPT_LOGPROBS_BYTES + 4096 < MAX_SMALL_FRAME_BYTES
    for num_top in (0, 1, 5, 20):
        longest = 1 + MAX_PROMPT_LOGPROBS_BYTES // (4 + 8 * num_top)
        assert prompt_logprobs_problem(longest, num_top) is None
        problem = prompt_logprobs_problem(longest + 1, num_top)
        assert problem is not None and f"prompt_logprobs {num_top}" in problem
    assert prompt_logprobs_problem(10**9, None) is None
