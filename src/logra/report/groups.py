"""Runs that differ in nothing but their seed are one group: one curve with a band. What tells groups apart."""

import re
from dataclasses import dataclass
from typing import Any

from logra.report.run import Run

IGNORED = ("output_dir", "overwrite", "resume", "versions", "run.seed", "run.num_threads", "run.report_to", "logra.seed",
           "trust.seed", "rollout.num_workers")  # fmt: skip
"""Settings that do not make a run another experiment."""
ABSENT = "-"
"""Shown where a run has no such setting."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of one setting."""

    label: str
    """Short and different from those of the other groups."""
    runs: list[Run]
    settings: dict[str, Any]
    """Resolved configuration, flat, without what is ignored."""


def group_runs(runs: list[Run]) -> list[Group]:
    """Groups in the order in which their first runs were given."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(repr(sorted(_settings(run).items())), []).append(run)
    groups = list(by_settings.values())
    labels = _labels(groups)
    return [
        Group(label=label, runs=members, settings=_settings(members[0]))
        for label, members in zip(labels, groups, strict=True)
    ]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + str(name)] = value
    return flat


def differences(groups: list[Group]) -> dict[str, list[Any]]:
    """Settings that are not the same in all groups, with the value of each group."""
    names = list(dict.fromkeys(name for group in groups for name in group.settings))
    values = {name: [group.settings.get(name, ABSENT) for group in groups] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def _settings(run: Run) -> dict[str, Any]:
    flat = flatten(run.config)
    return {
        name: value
        for name, value in flat.items()
        if not any(name == own or name.startswith(f"{own}.") for own in IGNORED)
    }


def _labels(groups: list[list[Run]]) -> list[str]:
    """Methods if they tell the groups apart, else names of folders, else paths."""
    for label in (_method, _folder_names):
        labels = [label(members) for members in groups]
        if (len(groups) > 1 or label is _folder_names) and len(set(labels)) == len(labels):
            return labels
    return [str(members[0].folder) for members in groups]


def _method(members: list[Run]) -> str:
    return str(members[0].config.get("method", "?"))


def _folder_names(members: list[Run]) -> str:
    """The folder's name; of several, what is left without the seed, if that is the same."""
    names = [run.folder.resolve().name for run in members]
    stems = {re.sub(r"[-_. ]*(seed|s)?[-_. ]*\d+$", "", name) for name in names}
    return stems.pop() or names[0] if len(names) > 1 and len(stems) == 1 else names[0]
