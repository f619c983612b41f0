"""`baton completion bash|zsh|fish`: print a script that completes the words of `baton`.

    source <(baton completion bash)                                  # in ~/.bashrc
    source <(baton completion zsh)                                   # in ~/.zshrc, after compinit
    baton completion fish > ~/.config/fish/completions/baton.fish

The scripts ask `baton __complete WORDS`, so that they never grow old.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from typing import Final

from router.command.config import PROGRAMS, settings_of
from router.command.main import by_name
from router.command.operator import new_parser
from router.command.terminal import say
from wire.process.settings import choices_of_flags

SCRIPTS: Final = {
    "bash": """\
_baton() {
    local IFS=$'\\n' word=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=($(compgen -W "$(baton __complete "${COMP_WORDS[@]:1:COMP_CWORD}")" -- "$word"))
}
complete -o default -F _baton baton
""",
    "zsh": """\
_baton() {
    local -a found=("${(@f)$(baton __complete "${(@)words[2,CURRENT]}")}")
    [[ -n $found ]] && compadd -a found || _files
}
compdef _baton baton
""",
    "fish": """\
function __baton
    set -l words (commandline -opc) (commandline -ct)
    set -l found (baton __complete $words[2..])
    string length -q -- $found; and printf '%s\\n' $found; or __fish_complete_path $words[-1]
end
complete -c baton -f -a '(__baton)'
""",
}
# Commands that take the flags of a program, by name.
SETTINGS: Final = {"router": "router", "serve": "router", "worker": "worker", "config": "router"}


def run(argv: Sequence[str]) -> int:
    """Print the completion script for a shell."""
    parser = new_parser("completion", __doc__)
    parser.add_argument("shell", choices=SCRIPTS)
    say(SCRIPTS[parser.parse_args(argv).shell], end="")
    return 0


def complete(words: Sequence[str]) -> int:
    """Print the words that can stand at the last place of `baton WORDS`, one on each line."""
    *before, last = words or [""]
    found = candidates(before, last)
    say("\n".join(each for each in found if each.startswith(last)))
    return 0


def candidates(before: Sequence[str], last: str) -> list[str]:
    """Return what can follow the words `before`; [] where a shell should offer files."""
    commands = by_name()
    if not before:
        return [*commands, "--help"]
    name = before[0]
    if name in SETTINGS:
        program = before[1] if name == "config" and before[1:2] == ["worker"] else SETTINGS[name]
        flags = choices_of_flags(settings_of(program))
        if before[-1] in flags and not last.startswith("-"):
            return flags[before[-1]]
        words = [*PROGRAMS, "--json"] if name == "config" and len(before) == 1 else []
        return [*words, *flags, "--help"] if last.startswith("-") else words
    if name == "completion":
        return list(SCRIPTS)
    return _flags_in_help(commands[name].module) if name in commands and last[:1] == "-" else []


def _flags_in_help(module: str) -> list[str]:
    """Return the flags at the beginning of a line of a command's --help."""
    with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
        import_module(module).run(["--help"])
    lines = re.findall(r"(?m)^ +(-\S.*?)(?:  |$)", text.getvalue())
    return sorted({flag for line in lines for flag in re.findall(r"--[a-z][a-z-]*", line)})
