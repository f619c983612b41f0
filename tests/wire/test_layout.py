"""Groups of layers: their sizes, and how much of each is sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.wire.transfer.layouts import layouts
from wire.errors import RemoteProtocolError
from wire.layout import MAX_LAYER_BYTES, KVGroup, KVLayout, StateGroup
from wire.payloads import decode_map, encode_map

FULL = KVGroup(num_layers=12, num_kv_heads=8, key_dim=64, value_dim=64, dtype="bfloat16")
WINDOWED = KVGroup(
    num_layers=12, num_kv_heads=8, key_dim=64, value_dim=64, dtype="bfloat16", window=128
)
STATE = StateGroup(num_layers=36, num_heads=32, head_bytes=64 << 10)
LATENT = KVGroup(num_layers=27, num_kv_heads=1, key_dim=576, value_dim=0, dtype="bfloat16")


def test_bytes_of_a_token_and_of_states() -> None:
    layout = KVLayout(groups=(FULL, WINDOWED, STATE))
    assert layout.token_bytes == 24 * 8 * 128 * 2
    assert layout.piece_bytes == 2 << 20
    assert layout.state_bytes == 36 * 32 * (64 << 10)
    assert layout.windows == (128,) and layout.has_state
    wider = structs.replace(WINDOWED, window=900)
    assert KVLayout(groups=(WINDOWED, wider, FULL, WINDOWED)).windows == (128, 900)
    plain = KVLayout.uniform(num_layers=12, num_kv_heads=8, head_dim=64, dtype="bfloat16")
    assert plain == KVLayout(groups=(FULL,))
    assert plain.windows == () and not plain.has_state and plain.state_bytes == 0
    assert KVLayout(groups=(LATENT,)).token_bytes == 27 * 576 * 2


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("uint8", 1)]
)
def test_bytes_of_an_element(dtype: str, size: int) -> None:
    assert structs.replace(FULL, dtype=dtype).head_bytes == 128 * size


def test_transfer_bytes_of_windows_and_states() -> None:
    layout = KVLayout(groups=(FULL, WINDOWED))
    group_bytes = 12 * 8 * 128 * 2
    assert layout.transfer_bytes(8192) == (8192 + 127) * group_bytes
    assert layout.transfer_bytes(8192, 8000) == (192 + 127) * group_bytes
    assert layout.transfer_bytes(8192, 8100) == (92 + 92) * group_bytes
    assert layout.transfer_bytes(8192, 8192) == 0
    assert layout.transfer_bytes(100) == 200 * group_bytes
    states = KVLayout(groups=(FULL, STATE))
    assert states.transfer_bytes(9) - 9 * group_bytes == 36 * 32 * (64 << 10)
    assert states.transfer_bytes(9, 8) - group_bytes == 36 * 32 * (64 << 10)
    assert states.transfer_bytes(9, 9) == 0


@given(layouts(), st.integers(0, 30), st.integers(1, 30))
def test_more_that_is_held_is_never_more_to_send(layout: KVLayout, cached: int, count: int) -> None:
    num_tokens = cached + count
    sizes = [layout.transfer_bytes(num_tokens, held) for held in range(num_tokens + 1)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 0
    assert decode_map(KVLayout, encode_map(layout)) == layout


def test_a_layer_at_one_position_fits_a_segment() -> None:
    StateGroup(num_layers=1, num_heads=1, head_bytes=MAX_LAYER_BYTES)
    with pytest.raises(ValueError, match="8388608 bytes at one position, over 4194304"):
        StateGroup(num_layers=1, num_heads=2, head_bytes=MAX_LAYER_BYTES)
    content = {"num_layers": 1, "num_kv_heads": 1024, "key_dim": 4096, "value_dim": 1}
    with pytest.raises(RemoteProtocolError, match=r"`\$.groups\[0\]`: .* over 4194304"):
        group = content | {"kind": "kv", "dtype": "uint8"}
        decode_map(KVLayout, encode_map({"groups": [group]}))  # type: ignore[arg-type]


def test_a_layout_has_a_short_text() -> None:
    layout = KVLayout(groups=(FULL, WINDOWED, LATENT, STATE))
    assert str(layout) == (
        "12 layers x 8 heads x 64 of bfloat16 and "
        "12 layers x 8 heads x 64 of bfloat16 in a window of 128 and "
        "27 layers x 1 heads x (576 + 0) of bfloat16 and "
        "36 states x 32 heads x 65536 bytes"
    )
