"""Settings: one class declares flags, environment variables, validation and help.

    class Config(Settings):
        max_kv_transfer_bytes: int = setting(1 << 30, "Refuse more KV.", ge=1)

    config = parse(Config, sys.argv[1:])   # --max-kv-transfer-bytes, BATON_MAX_KV_TRANSFER_BYTES

Flags override environment variables, which override systemd credentials, the file of --config
(`wire.process.config_file`) and then defaults.  A bad value ends the process with a one-line error
and status 78 (EX_CONFIG); systemd does not restart it.
Secrets are never settings, only the paths of their files, because other users can read command
lines.

Flags are parsed by argparse, because errors of pydantic-settings name neither flag nor range.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from re import fullmatch
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from wire.process.config_file import TOP, Entry, read_tables

# Exit statuses from sysexits.h, after which the systemd units do not restart a process.
EX_CONFIG: Final = 78
# For a worker whose rank is in use: its settings may be right, and the rank may become free.
EX_TEMPFAIL: Final = 75
# For a worker that a router has asked to drain, beyond the range of sysexits.h: whoever started it
# leaves it ended, or starts it again at once.
EX_LEFT: Final = 80
EX_RESTART: Final = 81
# Upper limits of sizes in bytes, and of counts of blocks or tokens, in frames.  SPEC 5.1.
MAX_BYTES: Final = 2**63 - 1
MAX_COUNT: Final = 2**31 - 1
MAX_PORT: Final = 65_535
MAKE_KEYS: Final = "make keys with `baton keys` and say --keys DIR"
# The prefix of all environment variables.
PREFIX: Final = "BATON_"
# Variables with this prefix that are not settings of router or worker: `baton chat` reads them.
OTHER_VARIABLES: Final = {"BATON_API_KEY"}
DEFAULT: Final = "default"
# Flags that other servers have, and the flag that does this here.
_OF_OTHERS: Final = {"--port": "--http", "--host": "--http"}

_S = TypeVar("_S", bound=BaseSettings)
_T = TypeVar("_T")


class ConfigError(Exception):
    """The configuration is invalid; the message names the setting to change, and how."""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Begin the message of a ConfigError of the body with the flag of the setting `name`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{_flag(name)}: {error}") from None


def setting(default: _T, help_text: str, *, begins: str = "", **bounds: Any) -> _T:
    """Declare a field of `Settings`; `bounds` are pydantic's `ge`, `gt`, `le` and `lt`.

    A `title` among them names the value in --help.  With `begins`, this field and those after it
    are in the group of --help with that title.
    """
    extra: dict[str, Any] | None = {"begins": begins} if begins else None
    field: _T = Field(default=default, description=help_text, json_schema_extra=extra, **bounds)
    return field


class Settings(BaseSettings):
    """Base class of settings.  Sequences are written with commas (``--local 2,2``)."""

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
        if value == "" and Path in _types(field):  # would be the current directory
            raise ValueError("is empty: say a path, or leave it out")
        is_sequence = bool({tuple, list, frozenset} & _types(field))
        if not (is_sequence and isinstance(value, str)):
            return value
        return [item.strip() for item in value.split(",") if item.strip()]


def open_port(port: str, advice: str, may: str = "connect") -> ValueError:
    """Return the error for a port that other machines can reach without a key."""
    return ValueError(
        f"{port} can be reached from other machines, and there is no key to tell who may {may}: "
        f"{advice}, or add --insecure if you trust everybody on the network"
    )


class SharedSettings(Settings):
    """Settings that a router and its workers share; a router passes them to its local workers."""

    model: str = setting(
        "demo", "a model directory, 'demo', or a name on the Hugging Face hub", begins="Model"
    )
    executor: str = setting("torch", "what a worker computes with: torch, hash or module:factory")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where a worker computes")
    memory_share: float = setting(
        0.9, "share of a GPU's memory for a worker, or for all local workers together", gt=0, le=1
    )
    max_kv_transfer_bytes: int = setting(
        4 << 30,
        "largest KV cache of one request that may be transferred",
        begins="Limits",
        ge=1,
        le=MAX_BYTES,
    )
    keys: Path | None = setting(
        None,
        "directory with router.key or <role>-<rank>.key, and authorized_keys, as `baton keys` "
        "writes them; none: these systemd credentials, if there are any",
        begins="Access control",
    )
    drain_s: float = setting(
        30.0, "time to finish open requests after SIGTERM", begins="Process", ge=0, le=3600
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least log level")
    config: Path | None = setting(
        None, "TOML file of settings for the router and the workers of this machine"
    )

    @field_validator("model", "executor")
    @classmethod
    def _check_names(cls, name: str) -> str:
        return check_printable(name)

    @property
    def model_name(self) -> str:
        """The model's name in the API: the last part of `model`."""
        return self.model.rstrip("/").rpartition("/")[2]


def parse(
    kind: type[_S],
    argv: Sequence[str],
    *,
    beside: str = "",
    environ: Mapping[str, str] = os.environ,
) -> _S:
    """Parse the settings of a program, or exit with an error.

    Args:
        kind: The settings class; its docstring is the first line of --help.
        argv: The command line without the program.
        beside: The module with the `Config` of the other program (router or worker).  Its variables
            cause no warning, because all processes of a machine may share one environment file.
        environ: Searched for misspelt variables only; values are always read from os.environ.

    Raises:
        SystemExit: 78 after one line on stderr for a bad setting, 0 after --help.
    """
    config, _ = parse_with_origins(kind, argv, beside=beside)
    known = _variables(kind) | OTHER_VARIABLES
    given = [name for name in sorted(environ) if name.startswith(PREFIX)]
    if beside and not known.issuperset(map(str.upper, given)):
        known |= _variables(import_module(beside).Config)
    for variable in given:
        if variable.upper() not in known:
            hint = _suggest(variable, known)
            sys.stderr.write(f"{_program(kind)}: warning: {variable} is not a setting{hint}\n")
    return config


def parse_with_origins(
    kind: type[_S], argv: Sequence[str], *, beside: str = "", program: str = "", about: str = ""
) -> tuple[_S, dict[str, str]]:
    """Parse settings like `parse`, without its warnings; return also where each comes from.

    `program` and `about` are for --help and errors, instead of the module and its settings' line.

    The origin of a setting is its flag, its environment variable, ``credential NAME``,
    ``FILE:LINE`` or `DEFAULT`.

    Raises:
        SystemExit: 78 after one line on stderr for a bad setting, 0 after --help.
    """
    try:
        given = _given(kind, _Parser(kind, program, about).read(argv), beside)
        origins = {name: given[name].origin if name in given else DEFAULT for name in _names(kind)}
        return _validate(kind, given), origins
    except ConfigError as error:
        sys.stderr.write(f"{program or _program(kind)}: {error}\n")
        raise SystemExit(EX_CONFIG) from None


def groups(kind: type[BaseSettings]) -> dict[str, list[str]]:
    """Return the names of settings by the title of their group, in the order of --help."""
    found: dict[str, list[str]] = {}
    title = ""
    for name, field in kind.model_fields.items():
        if isinstance(field.json_schema_extra, dict):
            title = str(field.json_schema_extra["begins"])
        found.setdefault(title, []).append(name)
    return found


def choices_of_flags(kind: type[BaseSettings]) -> dict[str, list[str]]:
    """Return all flags of the settings, with the values to choose from if they are enumerated."""
    return {
        flag: _choices(field)
        for name, field in kind.model_fields.items()
        for flag in (_flag(name), *([_off(name)] if bool in _types(field) else []))
    }


def shown_value(value: object) -> str:
    """Return the value of a setting as in --help: "none" for None and empty ones."""
    if isinstance(value, tuple | list):
        return ",".join(map(shown_value, value)) or "none"
    return "none" if value in (None, "") else str(value)


def port_of(text: str) -> int | None:
    """Parse a port number from 0 to `MAX_PORT` in ASCII digits; None if it is not one."""
    return int(text) if fullmatch("[0-9]{1,5}", text) and int(text) <= MAX_PORT else None


def check_printable(text: str) -> str:
    """Return `text`, or raise ValueError if it has unprintable characters."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed, like a line break: remove them")
    return text


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint`, or raise ValueError if ZeroMQ cannot bind it."""
    found = fullmatch(r"tcp://[^/]+:(.*)|ipc://.+", endpoint)
    if found is None or (found[1] is not None and port_of(found[1]) is None):
        raise ValueError(
            f"{endpoint!r} is neither tcp://HOST:PORT, with a port from 0 to 65535, nor ipc://PATH"
        )
    return endpoint


class _Parser(argparse.ArgumentParser):
    def __init__(self, kind: type[BaseSettings], program: str, about: str) -> None:
        super().__init__(
            prog=program or _program(kind),
            usage="%(prog)s [FLAGS]",
            description=about or kind.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for title, names in groups(kind).items():
            group = self.add_argument_group(title or None)
            for name in names:
                self._add(group, name, kind.model_fields[name])

    @staticmethod
    def _add(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
        origin = f"[default {shown_value(field.default)}; {_variable(name)}]"
        text = f"{field.description or ''} {origin}".strip().replace("%", "%%")
        flag, missing = _flag(name), argparse.SUPPRESS
        if bool in _types(field):
            group.add_argument(
                flag, nargs="?", const="true", default=missing, metavar="BOOL", help=text
            )
            group.add_argument(
                _off(name), dest=name, action="store_const", const="false", default=missing
            )
        else:
            group.add_argument(flag, default=missing, metavar=_metavar(field), help=text)

    def read(self, argv: Sequence[str]) -> dict[str, str]:
        """Parse flags to strings by field name.  Raises ConfigError for an unknown flag."""
        known, rest = self.parse_known_args(argv)
        if rest and not rest[0].startswith("-"):
            raise ConfigError(f"{rest[0]!r} has no flag before it, as in --model {rest[0]}")
        if rest:
            flag, flags = rest[0].partition("=")[0], self._option_string_actions
            ours = _OF_OTHERS.get(flag, "")
            hint = f"; did you mean {ours}?" if ours in flags else _suggest(flag, flags)
            raise ConfigError(f"{flag} is not a flag{hint}")
        return vars(known)

    def error(self, message: str) -> NoReturn:
        reason = message.removeprefix("argument ")
        flag, _, what = reason.partition(": ")
        if what == "expected one argument":  # argparse takes a value with a dash for a flag
            reason = f"{reason}; one that begins with a dash is written {flag}=..."
        raise ConfigError(reason)


class _Given(NamedTuple):
    """The text of a setting, and where it was given."""

    text: str
    origin: str


def _given(kind: type[BaseSettings], flags: Mapping[str, str], beside: str) -> dict[str, _Given]:
    """Return all settings that are given anywhere; of several places, the one that counts."""
    variables = {name.upper(): text for name, text in os.environ.items() if text}
    found = {
        name: _Given(variables[_variable(name)], _variable(name))
        for name in _names(kind)
        if _variable(name) in variables
    } | {name: _Given(text, _flag(name)) for name, text in flags.items()}
    directory = Path(os.environ.get("CREDENTIALS_DIRECTORY") or os.devnull)
    for path in directory.iterdir() if directory.is_dir() else ():
        name = path.name.lower().removeprefix(PREFIX.lower())
        if _variable(name).lower() == path.name.lower() and name in _names(kind):
            found.setdefault(name, _Given(path.read_text().strip(), f"credential {path.name}"))
    if "config" in found:
        path = Path(found["config"].text)
        for name, entry in _of_file(kind, path, beside).items():
            origin = f"{path}:{entry.line}" if entry.line else str(path)
            found.setdefault(name, _Given(entry.text, origin))
    return found


def _of_file(kind: type[BaseSettings], path: Path, beside: str) -> dict[str, Entry]:
    """Return the entries for this program of a file that other programs may read too.

    Raises:
        ConfigError: A key or a table is not one of any program, or the file cannot be read.
    """
    try:
        tables = read_tables(path)
    except ValueError as error:
        raise ConfigError(f"--config ({_variable('config')}): {error}") from None
    kinds = {_package(kind.__module__): kind}
    if beside:
        kinds[_package(beside)] = import_module(beside).Config
    known = {table: set(_names(each)) - {"config"} for table, each in kinds.items()}
    known[TOP] = set().union(*known.values())
    for table, entries in tables.items():
        if table not in known:
            hint = _suggest(table, known)
            raise ConfigError(f"{path}: [{table}] is not a table of settings{hint}")
        for key in entries.keys() - known[table]:
            where, hint = f"{path}:{entries[key].line}", _suggest(key, known[table])
            raise ConfigError(f"{where}: {key} is not a setting{table and f' of [{table}]'}{hint}")
    own = {**tables[TOP], **tables.get(_package(kind.__module__), {})}
    return {name: entry for name, entry in own.items() if name in _names(kind)}


def _validate(kind: type[_S], given: Mapping[str, _Given]) -> _S:
    try:
        values: dict[str, Any] = {name: each.text for name, each in given.items()}
        return kind(**values)
    except ValidationError as error:
        raise ConfigError(_explain(kind, dict(error.errors()[0]), given)) from None
    except UnicodeEncodeError as error:  # pydantic cannot encode the value in its error
        raise ConfigError(f"a setting has bytes that are no UTF-8: {error.object!r}") from None


def _explain(kind: type[BaseSettings], error: dict[str, Any], given: Mapping[str, _Given]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    field = kind.model_fields.get(str(error["loc"][0])) if error["loc"] else None
    if field is None:  # from a validator of the whole class, whose message names the settings
        return reason
    name = str(error["loc"][0])
    text, origin = given.get(name, _Given(error["input"], DEFAULT))
    is_elsewhere = origin not in (_flag(name), DEFAULT)
    setting = f"{_flag(name)} ({origin if is_elsewhere else _variable(name)}) = {text!r}"
    allowed = _allowed(field)
    if error["type"] == "value_error" or not allowed:
        return f"{setting}: {reason}"
    return f"{setting}: must be {allowed}"


def _names(kind: type[BaseSettings]) -> Collection[str]:
    return kind.model_fields.keys()


def _package(module: str) -> str:
    return module.partition(".")[0]


def _program(kind: type[BaseSettings]) -> str:
    return f"python -m {_package(kind.__module__)}"


def _off(name: str) -> str:
    return "--no-" + name.replace("_", "-")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _variables(kind: type[BaseSettings]) -> set[str]:
    return set(map(_variable, kind.model_fields))


def _suggest(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else ""


def _walk(annotation: Any) -> list[Any]:
    """Return a type and the types nested in it: members of unions, Annotated and generics."""
    return [annotation, *(found for item in get_args(annotation) for found in _walk(item))]


def _types(field: FieldInfo) -> set[Any]:
    found = _walk(field.annotation)
    return {
        get_origin(item) or item for item in found if isinstance(item, type) or get_origin(item)
    }


def _choices(field: FieldInfo) -> list[str]:
    for item in _walk(field.annotation):
        if get_origin(item) is Literal:
            return [shown_value(choice) for choice in get_args(item)]
    return []


def _metavar(field: FieldInfo) -> str:
    choices = _choices(field)
    if choices:
        return "{" + ",".join(choices) + "}"
    kinds = _types(field)
    return field.title or ("N" if int in kinds else "X" if float in kinds else "TEXT")


def _allowed(field: FieldInfo) -> str:
    """Describe the allowed values of a setting; "" if only its validator defines them."""
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
