"""Read settings from the command line, the environment, a YAML file and the defaults; the first that has one wins."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import signal
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from specserve.config.declare import Setting, convert, flag_of
from specserve.config.notes import CHOSEN, UNUSED, Notes
from specserve.config.peers import DRAWN, KEYS, VLLM, asking, of_vllm, simulated
from specserve.config.settings import GROUPS, SETTINGS, Settings

log = logging.getLogger(__name__)

PREFIX = "SPECSERVE_"
SIMILAR = 0.7  # of 1, from which a name is worth a hint


_PEERS = tomllib.loads((Path(__file__).parent / "peer_flags.toml").read_text())


def _reasons(table: str) -> dict[str, str]:
    return {f"--{flag}": reason for reason, flags in _PEERS[table].items() for flag in flags.split()}


_NO_EFFECT = _reasons("no_effect")
_SIZES = _reasons("only_one")
_NOT_TAKEN = _SIZES | _reasons("refused")
_ELSEWHERE = {f"--{flag}": ours for flag, ours in _PEERS["elsewhere"].items()}
_BY_NAME = {name: declared for declared in SETTINGS.values() for name in declared.names}


def load_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings from every source. Raises ValueError naming the setting and the source at fault, and of the
    command line all that are."""
    given, problems = _parse_arguments(argv)
    path = _file(given, environ)
    values: dict[str, Any] = {}
    for name, raw in given.items():
        try:
            found = _named({name: raw}, flag_of)
            if not values.keys().isdisjoint(found):
                raise ValueError(f"{flag_of(name)}: given twice, under two names")
            values |= found
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    values |= _from_environment(environ, values)
    if path is not None:
        read = {name: raw for name, raw in _read_yaml(path).items() if not _changes_nothing(name, raw)}
        values |= _named(read, str, values, f"{path}: ")
    return Settings(**values)


def _file(given: dict[str, Any], environ: Mapping[str, str]) -> Path | None:
    """Take the YAML file's path from flags or the environment."""
    path = given.pop("config", None) or environ.get(PREFIX + "CONFIG")
    return Path(path) if path else None


def _changes_nothing(name: str, raw: object) -> bool:
    """Return whether a line of the file, or a keyword, is a setting of other servers that is taken and not read."""
    if name == "enable_prefix_caching" and raw is False:  # the other way round, it would
        return False
    return flag_of(name) in _NO_EFFECT or (flag_of(name) in _SIZES and raw in (None, 1))


def unused(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Notes:
    """Return notes on what was given and is not read: flags of other servers that change nothing here, and variables
    that Kubernetes made for Services with names like ours."""
    reasons, path = _NO_EFFECT | _SIZES, _file(_parse_arguments(argv)[0], environ)
    lines = {} if path is None else _read_yaml(path)
    names = [*(each.partition("=")[0] for each in _usual(argv)), *map(flag_of, lines)]
    notes = {f"{flag} has no effect: {reasons[flag]}": UNUSED for flag in names if flag in reasons}
    variables = sorted(key for key, text in environ.items() if _is_link(key, text))
    note = f"{', '.join(variables)}: not read: Kubernetes makes such variables for a Service"
    notes |= {note: CHOSEN} if variables else {}
    drawn = f"is read as {flag_of(DRAWN)}, unless that is given"
    return notes | {f"{name} {drawn}": CHOSEN for name in asking(environ)}


_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def _is_link(key: str, text: str) -> bool:
    address = key.endswith("_PORT") and re.match("(tcp|udp|sctp)://", text)
    return key.startswith(PREFIX) and bool(address or _LINK.fullmatch(key.removeprefix(PREFIX)))


def make_settings(**values: Any) -> Settings:
    """Make settings from Python keywords: the flags' names with underscores. Logs those of other servers that change
    nothing here. Raises ValueError."""
    for name in (idle := [name for name, raw in values.items() if _changes_nothing(name, raw)]):
        log.warning("%s has no effect: %s", name, (_NO_EFFECT | _SIZES)[flag_of(name)])
    return Settings(**_named({name: raw for name, raw in values.items() if name not in idle}, str))


def _from_environment(environ: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``SPECSERVE_*``, and other servers' variables for acceptance that is drawn. An empty variable counts as not
    set. ``known``: values of sources that go first."""
    given = {
        key[len(PREFIX) :].lower(): text
        for key, text in environ.items()
        if key.startswith(PREFIX) and key != PREFIX + "CONFIG" and text and not _is_link(key, text)
    }
    values = _named(given, lambda name: PREFIX + name.upper(), known)
    mean = None if DRAWN in {**known, **values} else simulated(environ)
    return {**values, DRAWN: mean} if mean is not None else values


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the lines of a YAML file that have a value, with underscores in their names. Raises ValueError."""
    import yaml

    try:
        text = path.read_text()
        data, nodes = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:  # its message quotes the line, which may contain a secret
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ValueError(f"--config: {path} can't be read: line {line}: {error.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config: {path} can't be read: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ValueError(f"--config: {path} must contain lines of `name: value`")
    assert nodes is not None
    counts = Counter(key.value.replace("-", "_") for key, _ in nodes.value)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"{path}: {twice[0]}: given twice")
    return {key.replace("-", "_"): raw for key, raw in data.items() if raw is not None}


def _named(
    given: Mapping[str, Any],
    spell: Callable[[str], str],
    known: Mapping[str, Any] = MappingProxyType({}),
    source: str = "",
) -> dict[str, Any]:
    """Return the values by the settings' names. Those that are ``known`` are not looked at, so that a flag is enough to
    replace a bad one. ``spell`` writes a name as the source does; errors begin with ``source``."""
    values: dict[str, Any] = {}
    for name, raw in given.items():
        label = source + spell(name)
        if name == VLLM:
            found: dict[str, Any] = of_vllm(raw, label)
        elif name in _BY_NAME:
            declared = _BY_NAME[name]
            found = {declared.name: None if declared.name in known else convert(declared, raw, label)}
        else:
            raise ValueError(f"{label}: {_unknown('setting', name, spell, _BY_NAME)}")
        if not values.keys().isdisjoint(found):
            raise ValueError(f"{label}: given twice, under two names")
        values |= {each: known.get(each, value) for each, value in found.items()}
    return values


def _unknown(noun: str, name: str, spell: Callable[[str], str], known: Iterable[str]) -> str:
    """Say what to do about a name that is no setting's."""
    flag = flag_of(name)
    if why := _NOT_TAKEN.get(flag) or _NO_EFFECT.get(flag):
        return f"not accepted: {why}; leave it out"
    if flag in _ELSEWHERE:
        ours = re.sub("--([a-z-]+)", lambda match: spell(match[1].replace("-", "_")), _ELSEWHERE[flag])
        return f"unknown {noun}; here it is {ours}"
    nearest = next(iter(difflib.get_close_matches(name, known, n=1, cutoff=SIMILAR)), None)
    if nearest is None:
        return f"unknown {noun}; --help lists all"
    if name == nearest:
        return f"unknown {noun}; write {spell(nearest)}"
    if _SWITCH.sub("", name) == _SWITCH.sub("", nearest):
        return f"unknown {noun}; leave it out: there is only {spell(nearest)}"
    return f"unknown {noun}; the nearest known one is {spell(nearest)}"


_SWITCH = re.compile("^(no_)?(enable_|disable_)?")


class FlagParser(argparse.ArgumentParser):
    """Raises ValueError naming the argument."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt from here on, unless a shell's background job ignores it, or in another thread."""
    if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_code(run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code: by default 0, 2 for a user's mistake, 130 if it is interrupted."""
    raise_interrupts()
    try:
        return run() or 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def own_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a tool that also takes the server's flags, and these. Prints the tool's part of --help."""
    options, flags = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(flags):
        parser.print_help()
        print("\nand the server's:\n")
    return options, flags


def _parse_arguments(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of known flags, and what is wrong with the rest."""
    namespace, unknown = _parser().parse_known_args(_usual(argv))
    if unknown and not unknown[0].startswith("-"):
        raise ValueError(f"unexpected argument {unknown[0]!r}: settings are given as --name value")
    flags = dict.fromkeys(each.split("=")[0] for each in unknown if re.match("--?[a-zA-Z]", each))
    flags |= {flag: None for flag in _SIZES if getattr(namespace, flag, "1") != "1"}
    known = [*_BY_NAME, "config", "help", VLLM]
    problems = [
        f"{flag}: {_unknown('flag', flag.lstrip('-').replace('-', '_'), flag_of, known)}" for flag in flags
    ]
    ours = {*SETTINGS, "config", VLLM}
    return {name: value for name, value in vars(namespace).items() if name in ours}, problems


def _usual(argv: Sequence[str]) -> list[str]:
    """Return the arguments, with a flag before a model that comes first, as in ``vllm serve MODEL``, and the names of
    vLLM's short flags."""
    words = [
        re.sub("^-([tdp]p)$", r"--\1", "--enable-expert-parallel" if word == "-ep" else word) for word in argv
    ]
    if words[:1] == ["serve"]:
        del words[0]
    if not words or words[0].startswith("-"):
        return words
    if {"--model-path", "--model"} & {word.partition("=")[0] for word in words}:
        raise ValueError(f"--model-path: given twice, first as {words[0]!r}")
    return ["--model-path", *words]


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="python -m specserve.launch",
        description="OpenAI-compatible server with lossless speculative decoding.",
        epilog="Each setting is also read from SPECSERVE_<NAME> and from the YAML file; flags come first.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, `name: value` a line.")
    parser.add_argument(
        "-sc", flag_of(VLLM), dest=VLLM, metavar="JSON", help="vLLM's, of: " + ", ".join(KEYS)
    )
    for flag in _NO_EFFECT:  # a switch must not swallow the model that follows it
        switch = re.match("--((enable|disable|skip|async|show|sleep|language)-|stream-output)", flag)
        takes: dict[str, Any] = {"action": "store_true"} if switch else {"nargs": "*"}
        parser.add_argument(flag, help=argparse.SUPPRESS, **takes)
    for flag in _SIZES:
        parser.add_argument(flag, help=argparse.SUPPRESS, dest=flag)
    groups = {group: parser.add_argument_group(group) for group in GROUPS}
    for declared in SETTINGS.values():
        shape, help = _shape(declared), declared.help.replace("%", "%%")
        groups[declared.group].add_argument(*declared.flags, dest=declared.name, help=help, **shape)
    return parser


def _shape(declared: Setting) -> dict[str, Any]:
    """Return how many values a flag takes: a boolean flag alone means true, and several names may follow one flag."""
    if declared.kind is bool:
        return {"nargs": "?", "const": True, "metavar": "BOOL"}
    if declared.kind is tuple:
        return {"nargs": "+", "action": "extend", "metavar": declared.name.rpartition("_")[2].upper()}
    metavar = "{" + ",".join(declared.choices) + "}" if declared.choices else declared.kind.__name__.upper()
    return {"metavar": metavar}
