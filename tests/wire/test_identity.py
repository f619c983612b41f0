"""Identities: one spelling, read back as written, and never compared by how they begin."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import RemoteProtocolError
from wire.frames import NO_RANK, Role
from wire.identity import MAX_EPOCH, Identity, is_of_party

ROLES = st.sampled_from([Role.PREFILL, Role.DECODE, Role.ANY])
IDENTITIES = st.builds(Identity, ROLES, st.integers(0, NO_RANK - 1), st.integers(0, MAX_EPOCH))


@given(IDENTITIES)
def test_identities_are_read_back(identity: Identity) -> None:
    assert Identity.parse(identity.name) == identity
    assert is_of_party(identity.name, str(identity))


@given(st.binary(max_size=40) | st.from_regex(rb"(prefill|decode|any)-[0-9]{1,12}-[0-9]{1,22}\n?"))
def test_any_bytes_give_the_identity_they_spell_or_an_error(name: bytes) -> None:
    with suppress(RemoteProtocolError):
        assert Identity.parse(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"decode-1",
        b"decode-1-",
        b"decode-01-7",
        b"decode-1-07",
        b"decode-+1-7",
        b"decode-1-7\n",
        b"router-1-7",
        b"Decode-1-7",
        b"decode-4294967294-7",
        b"decode-1-18446744073709551616",
        b"decode-1-7-7",
    ],
)
def test_invalid_identities_are_refused(name: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Identity.parse(name)
    assert not is_of_party(name, "decode-1")


def test_a_party_is_not_the_beginning_of_a_name() -> None:
    assert is_of_party(b"prefill-1-7", "prefill-1")
    assert not is_of_party(b"prefill-10-7", "prefill-1")
    assert not is_of_party(b"prefill-1-7", "prefill-10")
    assert not is_of_party(b"decode-1-7", "prefill-1")
