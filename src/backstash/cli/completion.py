"""``backstash completion``: what a shell needs to complete commands, options, their values, and files.

The shell's part is a few lines, which the command prints. They ask ``backstash completion --words WORD ...``
for what may follow, so they know each command that the installed version has. The answer is a line for each
candidate, the word and what it is with a tab between them, or one of two words that no candidate begins with:
``:files`` and ``:directories``, which the shell completes by itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module

from ._arguments import Parser

__all__ = ["complete", "main"]

_FILES, _DIRECTORIES = ":files", ":directories"
_USAGE = "backstash completion SHELL"
_DESCRIPTION = """\
Print what makes a shell complete the words of this command: commands, options, their values, files.
"""
_EXAMPLES = """\
examples:
  eval "$(backstash completion bash)"          in ~/.bashrc
  eval "$(backstash completion zsh)"           in ~/.zshrc
  backstash completion fish | source           in ~/.config/fish/config.fish
"""
_BASH = """\
_backstash() {
    local current=${COMP_WORDS[COMP_CWORD]} found IFS=$'\\n'
    found=($("${COMP_WORDS[0]}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    COMPREPLY=()
    case ${found[0]-} in
        :files) compopt -o filenames; COMPREPLY=($(compgen -f -- "$current")) ;;
        :directories) compopt -o filenames; COMPREPLY=($(compgen -d -- "$current")) ;;
        *) COMPREPLY=("${found[@]%%$'\\t'*}") ;;
    esac
}
complete -F _backstash backstash
"""
_ZSH = """\
_backstash() {
    local -a found
    found=("${(@f)$("${words[1]}" completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    case ${found[1]} in
        '') ;;
        :files) _files ;;
        :directories) _path_files -/ ;;
        *) found=("${(@)found//:/\\\\:}"); found=("${(@)found/$'\\t'/:}"); _describe backstash found ;;
    esac
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _backstash backstash
"""
_FISH = """\
function __backstash
    set -l words (commandline -opc)
    set -l current "$(commandline -ct)"
    set -l found ($words[1] completion --words $words[2..] "$current" 2>/dev/null)
    switch "$found[1]"
        case :files
            __fish_complete_path "$current"
        case :directories
            __fish_complete_directories "$current"
        case '*'
            printf '%s\\n' $found
    end
end
complete --command backstash --no-files --arguments '(__backstash)'
"""
_SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def main(arguments: Sequence[str]) -> int:
    """Print the shell's part, or with ``--words`` what may stand in place of the last word; returns 0."""
    if arguments[:1] == ["--words"]:
        print("\n".join(complete(arguments[1:])))
        return 0
    if not arguments:
        _parser().error(
            f"for which shell? `backstash completion bash`; allowed: {', '.join(_SHELLS)}"
        )
    options = _parser().read(arguments)
    print(_SHELLS[options.shell], end="")
    return 0


def _parser() -> Parser:
    parser = Parser("backstash completion", _DESCRIPTION, _EXAMPLES, _USAGE)
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=f"{', '.join(_SHELLS)}")
    return parser


def complete(words: Sequence[str]) -> list[str]:
    """What may stand in place of the last of ``words``, which follow ``backstash`` on a command line.

    >>> complete(["pl"])
    ["plan\\twhat each budget for a training script's memory would cost, from a few real steps"]
    >>> complete(["run", "--malloc", "t"]), complete(["run", "--disk", ""])
    (['tcmalloc', 'tbb'], [':directories'])
    """
    from . import _COMMANDS

    *before, current = [word for word in words if word != "="] or [""]
    if words and words[-1] == "=":  # bash has it as a word of its own
        before, current = [*before, current], ""
    if not before or before == ["help"]:
        others = {} if before else {"help": "", "--help": "", "--version": ""}
        known = (_COMMANDS | others).items()
        found = [f"{name}\t{what}" if what else name for name, what in known]
    elif before[0] in _COMMANDS:
        parser = import_module(f".{before[0]}", __package__)._parser()
        found = list(_of_command(parser, before[1:], current))
    else:
        found = []
    return [each for each in found if each.startswith((current, _FILES, _DIRECTORIES))]


def _of_command(parser: Parser, before: list[str], current: str) -> Iterator[str]:
    """What may follow a command and the words ``before``."""
    takes_script = "SCRIPT" in (parser.usage or "")
    option = None
    for at, word in enumerate(before):
        if option is not None:
            option = None
        elif takes_script and (word == "-m" or not word.startswith("-")):
            if word != "-m" or before[at + 1 :]:
                yield _FILES  # the script's own arguments; of modules none are known
            return
        elif parser.takes_value(word):
            option = word
    if option is None and current.startswith("--") and "=" in current:
        option, _, value = current.partition("=")
        yield from (f"{option}={each}" for each in _values(parser, option, value))
    elif option is not None:
        yield from _values(parser, option, current)
    elif current.startswith("-"):
        yield from _options(parser)
    elif takes_script:
        yield _FILES
    else:
        for action in parser.positionals():
            yield from _values_of(parser, action, current)


def _options(parser: Parser) -> Iterator[str]:
    for action in parser.actions():
        what = " ".join((action.help or "").replace("%%", "%").split())
        for name in action.option_strings:
            yield f"{name}\t{what}"


def _values(parser: Parser, option: str, current: str) -> Iterator[str]:
    for action in parser.actions():
        if option in action.option_strings:
            yield from _values_of(parser, action, current)


def _values_of(parser: Parser, action: argparse.Action, current: str) -> Iterator[str]:
    """What may stand for the value of an option or a positional argument; ``current`` may be its beginning."""
    metavar = str(action.metavar)
    done, comma, last = current.rpartition(",") if "," in metavar else ("", "", current)
    if action.choices is not None:
        yield from map(str, action.choices)
    elif action.dest in parser.suggestions:
        yield from (f"{done}{comma}{each}" for each in parser.suggestions[action.dest])
    elif metavar == "DIR":
        yield _DIRECTORIES
    elif metavar.startswith(("FILE", "OUT")):
        yield _FILES
    elif metavar in ("SIZE", "A,B,..."):
        words = ("auto", "unlimited") if metavar == "SIZE" else ()
        yield from (word for word in words if _takes(action, word))
        if last.isdigit():
            yield from (f"{done}{comma}{last}{unit}" for unit in ("MiB", "GiB"))


def _takes(action: argparse.Action, word: str) -> bool:
    """Whether ``word`` is a value of the option."""
    try:
        if callable(action.type):
            action.type(word)
    except argparse.ArgumentTypeError:
        return False
    return True
