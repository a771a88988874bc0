"""The gradient of one window, from the sketches that accumulated to the proposals of this process.

Everything happens once: sketches are reduced and recovered when the norm is first asked for, and the recovered gradients are
dropped when there are proposals, unless somebody wants to see them. A step that ends in an error finds the proposals again.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from logra import distributed
from logra.errors import CaptureError
from logra.optim import exchange, ownership
from logra.optim.config import Config
from logra.optim.frame import Frame
from logra.optim.gradients import recover_own
from logra.optim.layer import LayerGradient, Proposal, propose
from logra.sketch.capture import Capture
from logra.sketch.targets import Target


class Window:
    """What has become of the sketches since the last step.

    Args:
        capture: that accumulates them.
        targets: all of the optimizer.
    """

    def __init__(self, capture: Capture, targets: Sequence[Target]) -> None:
        self._capture = capture
        self._targets = targets
        self.owner_of: Mapping[str, int] = {}
        """Process by fully qualified name, once recovered."""
        self._norms: dict[str, Tensor] = {}
        self._own: dict[str, LayerGradient] = {}
        self._has_gradients = True
        self._proposals: dict[str, Proposal] | None = None
        self.shrink: Tensor | None = None
        """What clipping multiplied the gradients by that became proposals, fp32 scalar; None if they were left."""

    def clear(self) -> None:
        """Forget everything: another window begins."""
        self._norms, self._own, self._has_gradients, self._proposals, self.shrink = {}, {}, True, None, None

    @property
    def is_recovered(self) -> bool:
        """Whether the sketches have been reduced and recovered."""
        return bool(self._norms)

    @property
    def is_proposed(self) -> bool:
        """Whether the gradients have been turned into proposals."""
        return self._proposals is not None

    def recover(self) -> dict[str, Tensor]:
        """Norms of the gradients of all targets that move, fp32 scalars, the same bits on all processes.

        Raises:
            CaptureError: nothing was captured, or a dense gradient reached a target past its sketch.
        """
        if not self._norms:
            self.owner_of = ownership.owners(self._targets, distributed.num_processes())
            self._norms, self._own = recover_own(self._capture, self._targets, self.owner_of)
        return self._norms

    @property
    def moving(self) -> list[Target]:
        """The targets that ran backward on some process."""
        return [target for target in self._targets if target.fqn in self._norms]

    @property
    def frames(self) -> dict[str, Frame]:
        """Outlines of what moves."""
        return {target.fqn: Frame.of(self._capture, target) for target in self.moving}

    def propose(
        self, config: Config, state: Mapping[Any, MutableMapping[str, Any]], shrink: Tensor | None, *, keep: bool
    ) -> dict[str, Proposal]:
        """The proposals of the targets that this process owns; made once, with the arguments of the first call.

        Args:
            config: settings.
            state: parameter -> its optimizer state; not changed.
            shrink: what clipping multiplies the gradients by; None leaves them. It stays in `self.shrink`.
            keep: whether the gradients are wanted afterwards; the same on all processes.
        """
        if self._proposals is None:
            own = {target.fqn: target for target in self.moving if target.fqn in self._own}

            def one(fqn: str) -> Proposal:
                target, gradient = own[fqn], self._own[fqn]
                shape = (target.out_features, target.in_features)
                clipped = gradient if shrink is None else gradient.scaled(shrink)
                return propose(config, clipped, dict(state.get(target.parameter, {})), shape)

            self._proposals, self.shrink = exchange.for_each(list(own), one, "propose"), shrink
            if not keep:
                self._own, self._has_gradients = {}, False
        return self._proposals

    def gradients(self) -> dict[str, LayerGradient]:
        """The recovered gradients of all targets that move. All processes call it together.

        Raises:
            CaptureError: the proposals were made without `keep`; on all processes.
        """
        if not self._has_gradients:
            raise CaptureError(
                "an observer asks for the gradients of a step() that ended in an error before it was attached: they have "
                "been turned into a proposed step. Call zero_grad() and backward() again."
            )
        if distributed.num_processes() == 1:
            return self._own
        return exchange.gradients_of_all(self._own, self._norms, self.frames, self.owner_of)

    def check_unproposed(self) -> None:
        """Raise CaptureError where the gradients are gone, so that they cannot be clipped any more."""
        if self.is_proposed:
            raise CaptureError(
                "clip_grad_norm_() after a step() that ended in an error: the gradient has been turned into a proposed step. "
                "Repeat step(), or call zero_grad() first."
            )
