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
_HIDDEN = ("logra.trust", "logra.trust.help")
"""A trust region is set in the group `trust`, not inside `logra.Config`."""


class TrainParser(ArgumentParser):
    """Shows flags with dashes, as they are usually typed; underscores, as in YAML and Python, work too."""

    def format_help(self) -> str:
        """The help text."""
        return _FLAG.sub(lambda flag: flag.group().replace("_", "-"), super().format_help())


def parse(argv: Sequence[str]) -> TrainConfig:
    """The configuration that the arguments of `logra train` describe.

    Raises:
        ConfigError: a value or a combination that is not allowed.
        SystemExit: --help, or a flag or a value that cannot be parsed.
    """
    arguments = _normalised(argv)
    parser = build_parser(_requested_method(arguments))
    settings = parser.instantiate(parser.parse_args(arguments))
    return TrainConfig(**{field.name: settings[field.name] for field in dataclasses.fields(TrainConfig)})


def build_parser(method: str) -> TrainParser:
    """The parser of `logra train`, with the defaults of one method."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = TrainParser(prog="logra train", usage=USAGE, description=DESCRIPTION)
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
    """Flag names with underscores, and a bare `--overwrite` as `--overwrite=true`."""
    arguments: list[str] = []
    for index, token in enumerate(argv):
        name, equals, value = token.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
            following = argv[index + 1] if index + 1 < len(argv) else "--"
            if name == "--overwrite" and not equals and following.startswith("-"):
                equals, value = "=", "true"
        arguments.append(f"{name}{equals}{value}")
    return arguments


def _requested_method(arguments: Sequence[str]) -> str:
    """The method that flags or a configuration file ask for; its preset decides all other defaults."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--method")
    finder.add_argument("--config")
    found, _ = finder.parse_known_args(arguments)
    method = found.method
    if method is None and found.config is not None and Path(found.config).is_file():
        loaded = yaml.safe_load(Path(found.config).read_text(encoding="utf-8"))
        method = loaded.get("method") if isinstance(loaded, dict) else None
    method = method or "logra"
    if method not in METHODS:
        raise ConfigError(f"method={method!r}: one of {', '.join(METHODS)}")
    return method
