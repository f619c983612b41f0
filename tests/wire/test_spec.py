"""SPEC.md against the code: what the text says of a byte is what the code does with it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from struct import Struct, calcsize

import msgspec
import pytest

from wire import layout, payloads
from wire.errors import ErrorCode, RemoteProtocolError
from wire.frames import FRAMES, Tag
from wire.logprobs import MAX_PROMPT_LOGPROBS_BYTES
from wire.options import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_SEQUENCE_LENGTH,
    MAX_BAD_SEQUENCES,
    MAX_LOGIT_BIASES,
    MAX_OPTIONS_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STRUCTURE_LENGTH,
    MAX_TOP_LOGPROBS,
    Options,
)
from wire.parts import MAX_HEADERS, decode, message_of
from wire.payloads import CREDIT
from wire.session import ENDED, SESSION, Direction, SessionState
from wire.stream import DEFAULT_MAX_FRAME_BYTES, MAX_SMALL_FRAME_BYTES, StreamDecoder
from wire.timeline import ENTRY, MAX_ENTRIES, Kind
from wire.transfer.segment import (
    DESCRIPTOR,
    MAX_READ_BYTES,
    MAX_SEGMENT_BYTES,
    MAX_SEGMENTS,
    MAX_UNASKED_SEGMENTS,
    SegmentDescriptor,
)

WIRE = Path(payloads.__file__).parent
SPEC = (WIRE / "SPEC.md").read_text()
VECTORS = json.loads((WIRE / "vectors.json").read_text())["frames"]
WIDTHS = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i64": 8}
CODES = {"B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64"}
OFFSETS = ["offset", "size", "field", "type", "range"]
KEYS = ["key", "type", "default"]
ARROWS = {Direction.REQUEST: "→", Direction.RESPONSE: "←"}


def sections() -> dict[str, str]:
    """Heading number -> text up to the next heading."""
    pieces = re.split(r"^#{2,3} (\d+(?:\.\d+)?)\.? .*$", SPEC, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def tables(text: str, columns: list[str]) -> list[list[list[str]]]:
    """Every table whose first columns are these, as rows of cells."""
    found: list[list[list[str]]] = []
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
            if cells[: len(columns)] == columns:
                found.append([])
        elif header[: len(columns)] == columns and not cells[0].startswith("---"):
            found[-1].append(cells)
    return found


def fields_of(table: list[list[str]]) -> list[tuple[int, int, str, str]]:
    return [(int(row[0]), int(row[1]), row[2], row[3]) for row in table]


def layout_of(fixed: Struct, names: tuple[str, ...]) -> list[tuple[int, int, str, str]]:
    kinds = [CODES[code] for code in fixed.format[1:]]
    offsets = [calcsize("<" + fixed.format[1 : 1 + i]) for i in range(len(kinds))]
    return [
        (offset, WIDTHS[kind], name, kind)
        for offset, kind, name in zip(offsets, kinds, names, strict=True)
    ]


SECTION_OF = {
    **{tag: f"4.{i}" for i, tag in enumerate(list(Tag)[:7], start=1)},
    **{tag: f"5.{i}" for i, tag in enumerate(list(Tag)[7:], start=1)},
}
STRUCT_OF: dict[str, type[msgspec.Struct]] = {
    "4.2": payloads.PrefillRest,
    "4.6": payloads.Logprobs,
    "4.7": payloads.Usage,
    "4.8": Options,
    "5.1": payloads.HelloDetail,
    "5.2": payloads.WelcomeDetail,
    "5.3": payloads.Load,
    "5.3:1": payloads.TierLoad,
    "5.4": payloads.PeerDetail,
    "5.6": payloads.ErrorDetail,
    "6.1": layout.KVLayout,
    "6.1:1": layout.KVGroup,
    "6.1:2": layout.StateGroup,
    "6.2": payloads.Offer,
}


@pytest.mark.parametrize("tag", list(Tag), ids=lambda tag: tag.name)
def test_the_header_table_is_the_layout(tag: Tag) -> None:
    frame = FRAMES[tag]
    assert re.search(rf"^### {SECTION_OF[tag]} {tag.name}$", SPEC, re.MULTILINE)
    header = tables(sections()[SECTION_OF[tag]], OFFSETS)[0]
    assert fields_of(header) == layout_of(frame.layout, frame.__struct_fields__)
    assert sum(size for _, size, _, _ in fields_of(header)) == 16


@pytest.mark.parametrize("tag", list(Tag), ids=lambda tag: tag.name)
def test_request_id_0_is_refused_wherever_it_names_a_request(tag: Tag) -> None:
    rows = tables(sections()[SECTION_OF[tag]], OFFSETS)[0]
    ranges = {row[2]: row[4] for row in rows}
    if ranges.get("request_id", "0:").startswith("0:"):
        message_of(tag, bytes(16), ())
        return
    with pytest.raises(RemoteProtocolError, match=f"{tag.name}: request_id is 0, not 1 to"):
        message_of(tag, bytes(16), ())


def test_the_other_fixed_layouts_are_right_too() -> None:
    credit = tables(sections()["4.4"], OFFSETS)[1]
    assert fields_of(credit) == layout_of(CREDIT, payloads.Credit._fields)
    entry = tables(sections()["4.10"], OFFSETS)[0]
    assert fields_of(entry) == layout_of(ENTRY, ("kind", "start", "duration", "amount"))
    descriptor = tables(sections()["6.3"], OFFSETS)[0]
    names = SegmentDescriptor._fields
    assert fields_of(descriptor) == layout_of(DESCRIPTOR, (*names[:3], "in_memory", *names[3:-1]))


@pytest.mark.parametrize("section", STRUCT_OF)
def test_the_key_table_is_the_map(section: str) -> None:
    number, _, index = section.partition(":")
    rows = tables(sections()[number], KEYS)[int(index or 0)]
    kind = STRUCT_OF[section]
    wanted = [("kind", "required")] if kind.__struct_config__.tag_field else []
    for field in msgspec.structs.fields(kind):
        default = field.default if field.default_factory is msgspec.NODEFAULT else ()
        if field.required:
            text = "required"
        elif default is None:
            text = "nil"
        elif default == ():
            text = "[]"
        elif default == "xxh3_64":
            text = "`xxh3_64`"
        elif isinstance(default, str):
            text = f'"{default}"'
        else:
            text = str(default).lower().removesuffix(".0")
        wanted.append((field.encode_name, text))
    assert [(row[0], row[2]) for row in rows] == wanted


def test_every_tag_is_in_the_tag_table() -> None:
    rows = tables(sections()["3"], ["tag", "name"])[0]
    assert [(int(row[0]), row[1]) for row in rows] == [(tag.value, tag.name) for tag in Tag]


def test_every_error_code_is_listed() -> None:
    rows = tables(sections()["8"], ["code", "name", "at fault", "again"])[0]
    assert [(int(row[0]), row[1]) for row in rows] == [(one.value, one.name) for one in ErrorCode]
    assert all(len(row) == 5 and all(row) for row in rows)


def diagram() -> str:
    """Draw the session table as a mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {SessionState.IDLE.value}"]
    for state, row in SESSION.items():
        lines += [
            f"    {state.value} --> {after.value}: {ARROWS[direction]} {tag.name}"
            for (direction, tag), after in row.items()
            if after is not state or state not in ENDED
        ]
        lines += [f"    {state.value} --> [*]"] if state in ENDED else []
    return "\n".join(lines)


def test_every_session_transition_is_in_the_table_and_the_diagram() -> None:
    who = {"who asks": Direction.REQUEST, "who answers": Direction.RESPONSE}
    rows = tables(sections()["7"], ["state", "frame", "from", "next state"])[0]
    assert [(row[0], who[row[2]], row[1], row[3]) for row in rows] == [
        (state.value, direction, tag.name, after.value)
        for state, row in SESSION.items()
        for (direction, tag), after in row.items()
    ]
    assert f"```mermaid\n{diagram()}\n```" in sections()["7"]


def examples(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", SPEC, flags=re.MULTILINE | re.DOTALL)


def test_every_zmq_example_decodes_and_is_a_vector() -> None:
    seen = set()
    for text in examples("zmq"):
        parts = [bytes.fromhex(line) for line in text.splitlines()]
        seen.add(decode(parts).tag)
        assert [part.hex() for part in parts] in [vector["zmq"] for vector in VECTORS]
    assert seen == set(Tag), "every frame has an example"


def test_every_tcp_example_decodes_and_is_a_vector() -> None:
    assert examples("tcp")
    for text in examples("tcp"):
        octets = bytes.fromhex(text)
        decoder = StreamDecoder()
        decoder.receive(octets)
        assert decoder.next_message() is not None
        decoder.receive_eof()
        assert octets.hex() in [vector.get("tcp") for vector in VECTORS]


def test_the_kinds_of_a_timeline_are_in_its_table() -> None:
    names = {
        int(number): row[0]
        for row in tables(sections()["4.10"], ["kind", "duration"])[0]
        for number in re.findall(r"\d+", row[0])
    }
    assert names.keys() == {int(kind) for kind in Kind}
    assert all(
        kind.name.lower() in names[kind] for kind in Kind if not kind.name.startswith("STEP")
    )


def test_the_limits_are_the_constants() -> None:
    limits = {row[0]: row[1] for row in tables(sections()["9"], ["what", "limit"])[0]}
    large, small = DEFAULT_MAX_FRAME_BYTES >> 20, MAX_SMALL_FRAME_BYTES >> 20
    constants = {
        "headers of a message": str(MAX_HEADERS),
        "options": f"{MAX_OPTIONS_BYTES} bytes",
        "stop_token_ids": str(MAX_STOP_TOKEN_IDS),
        "logit_bias": str(MAX_LOGIT_BIASES),
        "structure": f"{MAX_STRUCTURE_LENGTH} characters",
        "allowed_token_ids": str(MAX_ALLOWED_TOKEN_IDS),
        "bad_sequences": f"{MAX_BAD_SEQUENCES} of at most {MAX_BAD_SEQUENCE_LENGTH}",
        "top logprobs": str(MAX_TOP_LOGPROBS),
        "prompt logprobs of a request": f"{MAX_PROMPT_LOGPROBS_BYTES >> 10} KiB",
        "groups of a layout": str(layout.MAX_GROUPS),
        "a layer of a group, of one token or state": f"{layout.MAX_LAYER_BYTES >> 20} MiB",
        "segment": f"{MAX_SEGMENT_BYTES >> 20} MiB",
        "segment in memory": f"{MAX_READ_BYTES >> 20} MiB",
        "segments of a transfer": str(MAX_SEGMENTS),
        "entries of a timeline": str(MAX_ENTRIES),
        "KV with an offer": (
            f"kv_unasked_bytes of the decode worker, {MAX_UNASKED_SEGMENTS} segments"
        ),
        "length of a frame on raw TCP": f"{large} MiB with a prompt or KV, else {small} MiB",
    }
    assert {name: limits[name] for name in constants} == constants


def test_every_section_the_code_cites_exists() -> None:
    known = set(sections())
    packages = [WIRE.parent / name for name in ("wire", "router", "worker", "kernels")]
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        for cited in re.findall(r"SPEC ([\d., and-]+\d|\d)", path.read_text()):
            for number in re.findall(r"\d+(?:\.\d+)?", cited):
                assert number in known, f"{path.name} cites SPEC {number}"
