"""Settings of a role: one frozen declaration is its flags, environment, validation and help.

    class Config(Settings):
        max_kv_transfer_bytes: int = setting(1 << 30, "Refuse more KV.", ge=1)

    config = parse(Config, sys.argv[1:])   # --max-kv-transfer-bytes, BATON_MAX_KV_TRANSFER_BYTES

A flag beats the environment, the environment beats a systemd credential, that beats the default.
A bad value ends the process with one line and status 78 (EX_CONFIG), which systemd does not
restart.  A secret is never a setting, only the path of its file is: a command line can be read.

Flags are argparse's, because pydantic-settings names neither flag nor range in its errors.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from re import fullmatch
from typing import Any, Final, Literal, NoReturn, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

# sysexits.h; the units restart after neither.
EX_CONFIG: Final = 78
# For a worker whose rank is taken: its settings may be right, and the rank may become free.
EX_TEMPFAIL: Final = 75
# The most bytes, and the most blocks or tokens, in a frame.  SPEC 5.1.
MAX_BYTES: Final = 2**63 - 1
MAX_COUNT: Final = 2**31 - 1
MAX_PORT: Final = 65_535
MAKE_KEYS: Final = "make keys with scripts/keys and say --keys DIR"
# What every variable begins with.
PREFIX: Final = "BATON_"

_S = TypeVar("_S", bound=BaseSettings)
_T = TypeVar("_T")


class ConfigError(Exception):
    """The configuration cannot work; the message says which setting to change, and how."""


def setting(default: _T, help_text: str, **bounds: Any) -> _T:
    """Declare a field of `Settings`; `bounds` are pydantic's: ge, gt, le, lt."""
    field: _T = Field(default=default, description=help_text, **bounds)
    return field


class Settings(BaseSettings):
    """A frozen declaration; sequences are written with commas (``--local 2,2``)."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        env_ignore_empty=True,
        enable_decoding=False,
        validate_default=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _split(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        if value == "" and Path in _types(field):  # which would be the directory we run in
            raise ValueError("is empty: say a path, or leave it out")
        is_sequence = bool({tuple, list, frozenset} & _types(field))
        if not (is_sequence and isinstance(value, str)):
            return value
        return [item.strip() for item in value.split(",") if item.strip()]


def open_port(port: str, advice: str, may: str = "connect") -> ValueError:
    """Make the error for a port that other machines can reach and that no key guards."""
    return ValueError(
        f"{port} can be reached from other machines, and there is no key to tell who may {may}: "
        f"{advice}, or add --insecure if you trust everybody on the network"
    )


class SharedSettings(Settings):
    """Settings that a router and its workers share; a router passes them to its local workers."""

    model: str = setting("demo", "a model directory, 'demo', or a name on the Hugging Face hub")
    executor: str = setting("torch", "what a worker computes with: torch, hash or module:factory")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where a worker computes")
    memory_share: float = setting(
        0.9, "share of a GPU's memory for a worker, or for all local workers together", gt=0, le=1
    )
    max_kv_transfer_bytes: int = setting(
        4 << 30, "largest KV cache of one request that may be transferred", ge=1, le=MAX_BYTES
    )
    keys: Path | None = setting(
        None,
        "directory with router.key or <role>-<rank>.key, and authorized_keys, as scripts/keys "
        "writes them; none: these systemd credentials, if there are any",
    )
    drain_s: float = setting(30.0, "time to finish open requests after SIGTERM", ge=0, le=3600)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least log level")

    @field_validator("model", "executor")
    @classmethod
    def _check_names(cls, name: str) -> str:
        return check_printable(name)

    @property
    def model_name(self) -> str:
        """The name that clients use for the model: the last part of `model`."""
        return self.model.rstrip("/").rpartition("/")[2]


def parse(
    kind: type[_S],
    argv: Sequence[str],
    *,
    beside: str = "",
    environ: Mapping[str, str] = os.environ,
) -> _S:
    """Read a role's settings, or end the process.

    Args:
        kind: The declaration; its docstring is the first line of --help.
        argv: The command line without the program.
        beside: The module that declares the other role's `Config`.  Its variables may be set here
            too: one file of variables may serve every process of a machine.
        environ: Only searched for misspelt variables; values are always read from os.environ.

    Raises:
        SystemExit: 78 after one line on stderr for a bad setting, 0 after --help.
    """
    parser = _Parser(kind)
    try:
        config = _validate(kind, parser.read(argv))
    except ConfigError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        raise SystemExit(EX_CONFIG) from None
    known = _variables(kind)
    given = [name for name in sorted(environ) if name.startswith(PREFIX)]
    if beside and not known.issuperset(map(str.upper, given)):
        known |= _variables(import_module(beside).Config)
    for variable in given:
        if variable.upper() not in known:
            hint = _suggest(variable, known)
            sys.stderr.write(f"{parser.prog}: warning: {variable} is not a setting{hint}\n")
    return config


def port_of(text: str) -> int | None:
    """Return the port, from 0 to `MAX_PORT`, that a text of ASCII digits says; None for others."""
    return int(text) if fullmatch("[0-9]{1,5}", text) and int(text) <= MAX_PORT else None


def check_printable(text: str) -> str:
    """Return a text that lines of a log and answers to clients can hold.  Raises ValueError."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed, like a line break: remove them")
    return text


def check_endpoint(endpoint: str) -> str:
    """Return an endpoint that ZeroMQ can bind.  Raises ValueError."""
    found = fullmatch(r"tcp://[^/]+:(.*)|ipc://.+", endpoint)
    if found is None or (found[1] is not None and port_of(found[1]) is None):
        raise ValueError(
            f"{endpoint!r} is neither tcp://HOST:PORT, with a port from 0 to 65535, nor ipc://PATH"
        )
    return endpoint


class _Parser(argparse.ArgumentParser):
    def __init__(self, kind: type[BaseSettings]) -> None:
        super().__init__(
            prog=f"python -m {kind.__module__.partition('.')[0]}",
            description=kind.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, field in kind.model_fields.items():
            self._add(name, field)

    def _add(self, name: str, field: FieldInfo) -> None:
        origin = f"[default {_text(field.default)}; {_variable(name)}]"
        text = f"{field.description or ''} {origin}".strip().replace("%", "%%")
        flag, missing = _flag(name), argparse.SUPPRESS
        if bool in _types(field):
            self.add_argument(
                flag, nargs="?", const="true", default=missing, metavar="BOOL", help=text
            )
            off = "--no-" + flag[2:]
            self.add_argument(off, dest=name, action="store_const", const="false", default=missing)
        else:
            self.add_argument(flag, default=missing, metavar=_metavar(field), help=text)

    def read(self, argv: Sequence[str]) -> dict[str, str]:
        """Return the given flags as strings by field.  Raises ConfigError on an unknown one."""
        known, rest = self.parse_known_args(argv)
        if rest:
            flag = rest[0].partition("=")[0]
            hint = _suggest(flag, self._option_string_actions)
            raise ConfigError(f"{flag} is not a flag{hint}")
        return vars(known)

    def error(self, message: str) -> NoReturn:
        reason = message.removeprefix("argument ")
        flag, _, what = reason.partition(": ")
        if what == "expected one argument":  # or one that argparse takes for another flag
            reason = f"{reason}; one that begins with a dash is written {flag}=..."
        raise ConfigError(reason)


def _validate(kind: type[_S], flags: dict[str, str]) -> _S:
    credentials = os.environ.get("CREDENTIALS_DIRECTORY", "")
    values: dict[str, Any] = {**flags}
    if credentials and Path(credentials).is_dir():
        values["_secrets_dir"] = credentials
    try:
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(_explain(kind, dict(error.errors()[0]), flags)) from None
    except UnicodeEncodeError as error:  # pydantic cannot even repeat what is wrong
        raise ConfigError(f"a setting has bytes that are no UTF-8: {error.object!r}") from None


def _explain(kind: type[BaseSettings], error: dict[str, Any], flags: dict[str, str]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    field = kind.model_fields.get(str(error["loc"][0])) if error["loc"] else None
    if field is None:  # a validator of the whole declaration; it names the settings itself
        return reason
    name = str(error["loc"][0])
    variable, allowed = _variable(name), _allowed(field)
    given = flags.get(name, os.environ.get(variable, error["input"]))
    setting = f"{_flag(name)} ({variable}) = {given!r}"
    if error["type"] == "value_error" or not allowed:
        return f"{setting}: {reason}"
    return f"{setting}: must be {allowed}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _variables(kind: type[BaseSettings]) -> set[str]:
    return set(map(_variable, kind.model_fields))


def _suggest(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


def _text(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(_text, value)) or "none"
    return "none" if value in (None, "") else str(value)


def _walk(annotation: Any) -> list[Any]:
    """Return a type with what it is made of: members of unions, Annotated and generics."""
    return [annotation, *(found for item in get_args(annotation) for found in _walk(item))]


def _types(field: FieldInfo) -> set[Any]:
    found = _walk(field.annotation)
    return {
        get_origin(item) or item for item in found if isinstance(item, type) or get_origin(item)
    }


def _choices(field: FieldInfo) -> list[str]:
    for item in _walk(field.annotation):
        if get_origin(item) is Literal:
            return [_text(choice) for choice in get_args(item)]
    return []


def _metavar(field: FieldInfo) -> str:
    choices = _choices(field)
    if choices:
        return "{" + ",".join(choices) + "}"
    kinds = _types(field)
    return "N" if int in kinds else "X" if float in kinds else "TEXT"


def _allowed(field: FieldInfo) -> str:
    """Say what a setting may be, "" if only its validator knows."""
    choices = _choices(field)
    if choices:
        return "one of " + ", ".join(choices)
    kinds = _types(field)
    if bool in kinds:
        return "true or false"
    noun = "an integer" if int in kinds else "a number" if float in kinds else ""
    if not noun or kinds & {tuple, list, frozenset}:
        return ""
    nested = [item for item in _walk(field.annotation) if not isinstance(item, type)]
    bounds = [*field.metadata, *(part for item in nested for part in getattr(item, "metadata", ()))]
    least = greatest = ""
    for bound in bounds:
        match bound:
            case Ge(ge=limit):
                least = f"from {limit}"
            case Gt(gt=limit):
                least = f"above {limit}"
            case Le(le=limit):
                greatest = f"up to {limit}"
            case Lt(lt=limit):
                greatest = f"below {limit}"
    return " ".join(filter(None, [noun, least, greatest]))
