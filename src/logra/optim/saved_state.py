"""Saving, loading and forgetting what a `SketchOptimizer` remembers.

In a run of several processes the moments of a target lie on its owner (`logra.optim.ownership`): a state dict is that of one
process, unless it is asked for whole. Whose moments these are is remembered, since the process group can end before the
state is saved; in another group than theirs they are not gathered and do not go on.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from logra import distributed
from logra.errors import ConfigError, LograError
from logra.optim import ownership, state
from logra.optim.non_targets import NonTargets
from logra.sketch.capture import Capture
from logra.sketch.targets import Target

logger = logging.getLogger("logra")


class SavedState(torch.optim.Optimizer):
    """The part of `SketchOptimizer` that other runs see."""

    targets: Sequence[Target]
    _non_targets: NonTargets
    _capture: Capture
    _built: bool
    _share: state.Share | None = None
    """Whose moments these are, since the last update or load; None while there are none."""
    _is_whole = False
    """Whether this is inside `whole_state`."""
    _has_warned = False

    @property
    def version(self) -> int:
        """Policy version: the number of updates applied to the weights."""
        return self.param_groups[0]["version"]

    def _clear_window(self) -> None:
        """Drop what has accumulated for the next step."""
        raise NotImplementedError

    def restart(self, *, version: int | None = None) -> None:
        """Forget all moments, and what has accumulated for the next step, as if training began with the weights as they are.

        Low planes of the weights and running input scales stay.

        Args:
            version: what the version becomes, for weights that were replaced from outside, at least the current one; None
                keeps it.

        Raises:
            ConfigError: a version that goes back.
        """
        if version is not None and version < self.version:
            raise ConfigError(f"version={version!r}: versions only go up, and this optimizer is at {self.version}")
        for target in self.targets:
            state.drop_moments(self.state[target.parameter])
        if self._non_targets.adamw is not None:
            for parameter in self.param_groups[1]["params"]:
                self.state.pop(parameter, None)
            self._non_targets.adamw.state.clear()
        self.param_groups[0]["coherence"] = [0, 0.0]
        self._share = None
        if version is not None:
            self.param_groups[0]["version"] = version
        self._clear_window()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: targets are modules, not parameters."""
        if getattr(self, "_built", True):
            raise ConfigError(
                "SketchOptimizer has no add_param_group: which weights are sketched is decided by target_modules when it is "
                "built. Build a new one with other patterns."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Settings, version and state. In a run of several processes, with the moments of this process's targets alone, also
        when their group has ended: it fits the same process of as many, and the first call warns. See `whole_state_dict`.
        """
        found = super().state_dict()
        if self._share is None or self._share[1] == 1 or (self._is_whole and self._share[0] == 0):
            return found
        found["param_groups"][0][state.SHARE] = list(self._share)
        if not self._is_whole and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "state_dict() has the moments of the targets of process %d of %d alone: the others cannot go on from its "
                "file. Save inside `with optimizer.whole_state():`, or whole_state_dict(), both on all processes; or "
                "use logra.checkpoint.save_sharded.",
                *self._share,
            )
        return found

    def check_processes(self) -> None:
        """Refuse to go on in another process group than the one whose moments these are.

        Raises:
            ConfigError: it is another one: of another number, with another number for this process, or none any more.
        """
        live = state.live_share()
        if self._share not in (None, live):
            raise ConfigError(
                f"the moments of this optimizer are those of process {self._share[0]} of {self._share[1]}; this is now "
                f"process {live[0]} of {live[1]}. Save whole_state_dict() on all processes before destroy_process_group(), "
                f"and load it in the new group"
            )

    def whole_state_dict(self) -> dict[str, Any]:
        """`state_dict()` with the moments of all targets on process 0, for any number of processes to load. All processes
        call it together; on the others it is `state_dict()`.

        Raises:
            ConfigError: see `whole_state`.
        """
        with self.whole_state():
            found = self.state_dict()
            # What belongs to others leaves the state again, but not the copy.
            return found | {"state": {index: dict(entry) for index, entry in found["state"].items()}}

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Inside, process 0 has the moments of all targets (others' on the CPU). All processes enter it together.

        Raises:
            ConfigError: the process group is not the one whose moments these are; on all processes.

        Example:
            >>> with opt.whole_state():  # on all processes
            ...     accelerator.save_state(folder)  # process 0 writes the optimizer's file
        """
        on_all(self.check_processes, "whole_state")
        with ownership.whole_on_leader(self.targets, self.state):
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` or `whole_state_dict()` returned: tensors keep their own dtype, whatever the dtype of the
        parameters. Of the moments, a process takes those of its own targets alone. All processes call it together.

        Raises:
            ConfigError: the state belongs to other targets, was saved with other settings, or lacks moments of this process.
            LograError: that of another process is refused. Nothing has been changed on any.
        """
        groups = state_dict.get("param_groups", [])

        def check() -> None:
            state.check_groups(self.param_groups, groups)
            state.check_share(groups[0])

        on_all(check, "load_state_dict")
        own_fqns = {target.fqn for target in ownership.own_targets(self.targets)}
        foreign = {target.parameter for target in self.targets if target.fqn not in own_fqns}
        for own, group in zip(self.param_groups, groups, strict=True):
            own.update({name: value for name, value in group.items() if name not in ("params", state.SHARE)})
            for parameter, index in zip(own["params"], group["params"], strict=True):
                saved = state_dict["state"].get(index, {})
                if parameter in foreign:  # left out before they are copied: a device need not hold the moments of all
                    saved = {name: value for name, value in saved.items() if not state.is_moment(name)}
                self.state[parameter] = state.on_device_of(parameter, saved)
        self._share = state.live_share() if self.version > 0 else None
        if self._non_targets.adamw is not None:
            for parameter in self.param_groups[1]["params"]:
                self._non_targets.adamw.state[parameter] = self.state[parameter]
        for target in self.targets:
            exponents = self.state[target.parameter].get("input_exponents")
            if exponents is not None:
                self._capture.set_exponents(target.fqn, exponents)
        self._clear_window()


def on_all(check: Callable[[], None], what: str, flag: bool = False) -> bool:
    """Run a check; if it refuses on one process, all of them raise.

    Args:
        check: without collectives.
        what: it is for, in the error of the others.
        flag: told to all in the same collective.

    Returns:
        Whether the flag is set on some process.

    Raises:
        ConfigError: this process is refused.
        LograError: another one is.
    """
    error: ConfigError | None = None
    try:
        check()
    except ConfigError as own_error:
        error = own_error
    refused, flag = distributed.any_process([error is not None, flag])
    if refused:
        raise error or LograError(f"{what}: another process was refused; its error says why")
    return flag
