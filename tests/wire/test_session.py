"""The session table: the frames allowed in each state, and the side at fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import LocalProtocolError, RemoteProtocolError
from wire.frames import Tag
from wire.session import ENDED, SESSION, Direction, Session, SessionState

REQUEST, RESPONSE = Direction.REQUEST, Direction.RESPONSE
EVENTS = st.lists(st.tuples(st.sampled_from(Direction), st.sampled_from(Tag)), max_size=12)


def test_the_table_knows_every_state_and_reaches_each() -> None:
    assert set(SESSION) == set(SessionState)
    reached = {after for row in SESSION.values() for after in row.values()}
    assert reached | {SessionState.IDLE} == set(SessionState)


def test_no_state_is_left_after_the_end() -> None:
    for state in ENDED:
        assert set(SESSION[state].values()) == {state}


@given(EVENTS, st.sampled_from(Direction))
def test_at_most_one_end_and_nothing_of_the_answerer_after_it(
    events: list[tuple[Direction, Tag]], sends: Direction
) -> None:
    session = Session(sends)
    ends = 0
    for direction, tag in events:
        was_over, before = session.is_over, session.state
        try:
            session.on(tag, direction)
        except LocalProtocolError:
            assert direction is sends and session.state is before
        except RemoteProtocolError:
            assert direction is not sends and session.state is before
        else:
            ends += session.is_over and not was_over
            if was_over:
                assert session.state is before
    assert ends <= 1


def test_the_one_who_broke_it_is_named() -> None:
    with pytest.raises(LocalProtocolError, match="DECODE_TOKEN as a response while idle"):
        Session(RESPONSE).on(Tag.DECODE_TOKEN, RESPONSE)
    with pytest.raises(RemoteProtocolError, match="DECODE_TOKEN as a response while idle"):
        Session(REQUEST).on(Tag.DECODE_TOKEN, RESPONSE)
