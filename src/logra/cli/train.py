"""`logra train`: from flags and a YAML file to a `TrainConfig`.

Precedence, from weak to strong: the method's preset, the file given with --config, flags.
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from logra.errors import ConfigError
from logra.rl.config import METHODS, TrainConfig, preset

DESCRIPTION = (
    "Train a language model by reinforcement learning (GRPO) on a task whose answers can be checked. "
    "Defaults are those of the chosen method."
)
USAGE = "logra train --output-dir DIR [--method METHOD] [--model MODEL] [--task TASK] [--config FILE] [options]"

_FLAG = re.compile(r"--[a-z][\w.-]*")
_GROUPS = ("rollout", "loss", "run", "guards", "checkpoints", "diagnostics", *preset("logra"))
_HIDDEN = ("logra.trust", "logra.trust.help")
"""A trust region is set in the group `trust`, not inside `logra.Config`."""
_SWITCHES = ("--overwrite", "--profile")


class TrainParser(ArgumentParser):
    """Shows flags with dashes, as they are usually typed; underscores, as in YAML and Python, work too."""

    def format_help(self) -> str:
        """The help text."""
        return _FLAG.sub(lambda flag: flag.group().replace("_", "-"), super().format_help())


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that the arguments of `logra train` describe.

    Raises:
        ConfigError: a value or a combination that is not allowed, or a file that is not there or is not YAML.
        SystemExit: --help, or a flag or a value that cannot be parsed.
    """
    arguments = _normalised(argv)
    method = _requested_method(arguments)
    parser = build_parser(method)
    parsed = parser.parse_args(arguments)
    for group in ("logra", "trust"):  # classes that Python users build too name their fields alone
        fields = {name: value for name, value in vars(parsed[group]).items() if f"{group}.{name}" not in _HIDDEN}
        try:
            type(preset(method)[group])(**fields)
        except ConfigError as error:
            raise ConfigError(f"{group}.{error}") from error
    settings = parser.instantiate(parsed)
    if settings["method"] != method:
        raise ConfigError(
            f"method={settings['method']!r}, but the defaults are those of method={method!r}: give the method once, as "
            f"--method METHOD or at the top level of the file given with --config"
        )
    return TrainConfig(**{field.name: settings[field.name] for field in dataclasses.fields(TrainConfig)})


def build_parser(method: str) -> TrainParser:
    """The parser of `logra train`, with the defaults of one method."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # An abbreviated --method would set the method without its preset.
    parser = TrainParser(prog="logra train", usage=USAGE, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with any of these settings, like a config.yaml.")
    parser.add_argument("--versions", type=dict, help=argparse.SUPPRESS)  # a config.yaml names those it was run with
    parser.add_class_arguments(TrainConfig, as_group=True)
    defaults: dict[str, Any] = {"method": method}
    for group, values in preset(method).items():
        for field in dataclasses.fields(values):
            if f"{group}.{field.name}" not in _HIDDEN:
                defaults[f"{group}.{field.name}"] = getattr(values, field.name)
    parser.set_defaults(defaults)
    for action in parser._actions:
        if action.dest in _HIDDEN or type(action).__name__ == "_ActionConfigLoad":
            action.help = argparse.SUPPRESS
    return parser


def _normalised(argv: Sequence[str]) -> list[str]:
    """Flag names with underscores, a bare switch as `--switch=true`, and files first: flags override them."""
    arguments: list[str] = []
    files: list[str] = []
    is_file = False
    for index, token in enumerate(argv):
        if is_file or token == "--config" or token.startswith("--config="):
            files.append(token)
            is_file = token == "--config" and not is_file
            continue
        name, equals, value = token.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
            following = argv[index + 1] if index + 1 < len(argv) else "--"
            if name in _SWITCHES and not equals and following.startswith("-"):
                equals, value = "=", "true"
        arguments.append(f"{name}{equals}{value}")
    return files + arguments


def _requested_method(arguments: Sequence[str]) -> str:
    """The method that flags or a configuration file ask for; its preset decides all other defaults."""
    finder = argparse.ArgumentParser(prog="logra train", usage=USAGE, add_help=False, allow_abbrev=False)
    finder.add_argument("--method")
    finder.add_argument("--config", action="append", default=[])
    found, _ = finder.parse_known_args(arguments)
    in_files = [method for config in found.config if (method := _read(config).get("method")) is not None]
    method = found.method or next(reversed(in_files), "logra")
    if method not in METHODS:
        raise ConfigError(f"method={method!r}: one of {', '.join(METHODS)}")
    return method


def _read(config: str) -> dict[str, Any]:
    """The settings in a file given with --config.

    Raises:
        ConfigError: with the file and the line.
    """
    try:
        loaded = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"config={config!r}{line}: not YAML: {error.problem}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config={config!r} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        held = "nothing" if loaded is None else f"a {type(loaded).__name__}"
        raise ConfigError(f"config={config!r}: must hold settings as `name: value`, but holds {held}")
    for group in _GROUPS:
        if group in loaded and not isinstance(loaded[group], dict):
            raise ConfigError(
                f"config={config!r}: {group}={loaded[group]!r}, but {group} is a group of settings, `name: value` each"
            )
    return loaded
