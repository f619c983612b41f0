"""Pieces of an answer."""

from __future__ import annotations

from router.api.completions.deltas import Delta, ScoredToken, joined


def test_pieces_become_one() -> None:
    scores = [ScoredToken(5, None, 0), ScoredToken(6, None, 1)]
    first = Delta("a", [5], scores[:1], prompt_scores=scores)
    pieces = [first, Delta("b", [6], scores[1:], "stop")]
    assert joined(pieces) == Delta("ab", [5, 6], scores, "stop", prompt_scores=scores)
