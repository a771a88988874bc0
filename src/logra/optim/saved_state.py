"""Saving, loading and forgetting what a `SketchOptimizer` remembers.

In a run of several processes the moments of a target lie on its owner (`logra.optim.ownership`): a state dict is that of one
process, unless it is asked for whole.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from logra import distributed
from logra.errors import ConfigError
from logra.optim import ownership, state
from logra.optim.non_targets import NonTargets
from logra.sketch.capture import Capture
from logra.sketch.targets import Target


class SavedState(torch.optim.Optimizer):
    """The part of `SketchOptimizer` that other runs see."""

    targets: Sequence[Target]
    _non_targets: NonTargets
    _capture: Capture
    _built: bool
    _has_all_moments = False

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
        """Settings, version and state. In a run of several processes, with the moments of this process's targets alone:
        it fits the same process of as many. See `whole_state_dict`.
        """
        found = super().state_dict()
        if distributed.num_processes() > 1 and not self._has_all_moments:
            found["param_groups"][0][state.SHARE] = [distributed.rank(), distributed.num_processes()]
        return found

    def whole_state_dict(self) -> dict[str, Any]:
        """`state_dict()` with the moments of all targets on process 0, for any number of processes to load. All processes
        call it together; on the others it is `state_dict()`.
        """
        with self.whole_state():
            found = self.state_dict()
            # What belongs to others leaves the state again, but not the copy.
            return found | {"state": {index: dict(entry) for index, entry in found["state"].items()}}

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Inside, process 0 has the moments of all targets (others' on the CPU). All processes enter it together."""
        with ownership.whole_on_leader(self.targets, self.state):
            self._has_all_moments = distributed.rank() == 0
            try:
                yield
            finally:
                self._has_all_moments = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` or `whole_state_dict()` returned: tensors keep their own dtype, whatever the dtype of the
        parameters. Of the moments, a process keeps those of its own targets.

        Raises:
            ConfigError: the state belongs to other targets, was saved with other settings, or lacks moments of this process.
        """
        groups = state_dict.get("param_groups", [])
        state.check_groups(self.param_groups, groups)
        state.check_share(groups[0])
        for own, group in zip(self.param_groups, groups, strict=True):
            own.update({name: value for name, value in group.items() if name not in ("params", state.SHARE)})
            for parameter, index in zip(own["params"], group["params"], strict=True):
                self.state[parameter] = state.on_device_of(parameter, state_dict["state"].get(index, {}))
        ownership.drop_others(self.targets, self.state)
        if self._non_targets.adamw is not None:
            for parameter in self.param_groups[1]["params"]:
                self._non_targets.adamw.state[parameter] = self.state[parameter]
        for target in self.targets:
            exponents = self.state[target.parameter].get("input_exponents")
            if exponents is not None:
                self._capture.set_exponents(target.fqn, exponents)
        self._clear_window()
