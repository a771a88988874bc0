"""The ledger: a dispatch mode that sees every tensor storage come and go, and says what each of its bytes was for.

    with Ledger(model, optimizer) as ledger:
        ...                          # rollout, forward, backward, step
        ledger.settle()              # at the end of every step
    ledger.report()

A byte belongs to exactly one category. In this order:

1. its owner: a parameter, a gradient, a sketch, a state of the optimizer, wherever one is found to hold the storage.
   Holders are looked up at every change of phase, and what is found holds for the whole life of the storage: a gradient
   was a gradient before autograd put it into `.grad`.
2. the purpose that was marked when it was allocated (`logra.phases`).
3. what it looks like: the size of a dense weight in backward (a gradient), the width of the vocabulary (logits), a
   cast or a clone of something known; buffers of FSDP's collectives.
4. the phase that allocated it.

It counts storages (a view costs nothing), bytes as requested, without an allocator's rounding; the workspace inside a
kernel is not a tensor and not seen. The same ledger runs over real tensors and over the fake ones of the planner.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from logra import phases
from logra.memory.categories import CATEGORIES
from logra.memory.owners import owned_tensors, storages_of, vocabulary_size
from logra.memory.timeline import Moments, Report, Timeline

_BY_PHASE = {
    "rollout": "rollout",
    "forward": "activations",
    "backward": "activations",
    "recover": "recovery_scratch",
    "probe": "activations",
    "update": "recovery_scratch",
    "sync": "sync",
}
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
_INHERITED = frozenset({"weights", "non_target_parameters", "projections"})
"""A cast of these is one more of them: the compute copy of a weight is a weight, not an activation."""
_GATHERS, _REDUCTIONS = ("all_gather", "allgather", "split_with_sizes_copy"), ("chunk_cat", "reduce_scatter")


class _Record:
    """One live storage."""

    __slots__ = ("category", "num_bytes", "owned", "reference")

    def __init__(self, category: str, num_bytes: int, owned: bool) -> None:
        self.category, self.num_bytes, self.owned = category, num_bytes, owned
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class Ledger(TorchDispatchMode):
    """Records live tensor bytes by category and phase while it is entered.

    Args:
        model: the policy.
        optimizer: its optimizer, or a function that returns it where it is built later; None for none.
        reference_model: a frozen second copy, or None.
        held: what else is alive from the beginning, such as a batch: (category, tensor) pairs.
        device: count storages of this device type only; None for those of the model's first parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        reference_model: nn.Module | None = None,
        held: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._optimizer: Callable[[], Any] = optimizer if _is_getter(optimizer) else lambda: optimizer
        self._reference_model = reference_model
        self._held = held or {}
        first = next(model.parameters(), None)
        self._device_type = (device or (torch.device("cpu") if first is None else first.device)).type
        self._vocabulary = vocabulary_size(model)
        self._dense_shapes: set[tuple[int, ...]] = set()
        self._records: dict[int, _Record] = {}
        self._in_optimizer = 0
        self._was_backward = False
        self._timeline = Timeline()
        self._contexts = ExitStack()

    # ---- what the outside reads ----

    @property
    def live_bytes(self) -> int:
        """Bytes of all live storages."""
        return self._timeline.live_bytes

    def live(self) -> dict[str, int]:
        """Live bytes by category, now."""
        self.sweep()
        found = dict.fromkeys(CATEGORIES, 0)
        for record in self._records.values():
            found[record.category] += record.num_bytes
        return found

    def settle(self) -> None:
        """Close the books of a step: its peaks are compared with those of earlier steps, its events forgotten."""
        self._timeline.settle(self.live())

    def restart(self) -> None:
        """Forget all peaks so far, for instance those of a first step that differs from all others."""
        self._timeline.restart()

    def moments(self) -> Moments:
        """The step since the last `settle` or `restart`, event by event; call it before `settle`."""
        return self._timeline.moments(self.live())

    def report(self) -> Report:
        """Peak and composition of every phase, over all settled steps."""
        return self._timeline.report()

    # ---- ownership ----

    def sweep(self) -> None:
        """Look up who owns which storage now."""
        owned = owned_tensors(self._model, self._optimizer(), self._reference_model)
        held = ((name, tensor) for name, tree in self._held.items() for tensor in _tensors(tree))
        for category, tensor in (*owned, *held):
            for storage in storages_of(tensor):
                record = self._see(storage, category)
                if record is not None:
                    record.category, record.owned = category, True
        # A frozen or sketched weight gets no dense gradient, so nothing of its shape can be one.
        trained = set() if self._optimizer() is None else _sketched(self._optimizer())
        self._dense_shapes = {
            tuple(parameter.shape) for parameter in self._model.parameters()
            if parameter.requires_grad and id(parameter) not in trained and parameter.dim() > 1
        }  # fmt: skip

    # ---- the mode ----

    def __enter__(self) -> "Ledger":
        self.sweep()
        self._timeline.begin()
        self._contexts.enter_context(phases.listening(self.sweep))
        self._contexts.enter_context(_resizing(self._on_resize))
        hooks = (
            register_optimizer_step_pre_hook(self._enter_step),
            register_optimizer_step_post_hook(self._leave_step),
        )
        for hook in hooks:
            self._contexts.callback(hook.remove)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._contexts.close()
        self._records.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(is_traceable_wrapper_subclass(leaf) for leaf in leaves):
            return NotImplemented  # DTensor unwraps itself first; its local operations come by again
        result = func(*args, **(kwargs or {}))
        self._note_backward()
        self._see_inputs(func, leaves)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not is_traceable_wrapper_subclass(tensor):
                storage = tensor.untyped_storage() if tensor.layout == torch.strided else None
                if storage is not None and storage._cdata not in self._records:
                    self._see(storage, self._category(func, tensor, leaves))
        return result

    def _note_backward(self) -> None:
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward != self._was_backward:
            self._was_backward = is_backward
            self.sweep()

    def _phase(self) -> str:
        marked = phases.current_phase()
        if marked is not None:
            return marked
        if self._was_backward:
            return "backward"
        if self._in_optimizer:
            return "update"
        return "forward"  # the grad mode tells nothing: an autograd.Function runs its forward without

    def _category(self, func: Any, tensor: Tensor, inputs: list[Tensor]) -> str:
        marked = phases.current_purpose()
        if marked is not None:
            return marked
        if func in _CASTS and inputs:
            source = self._records.get(inputs[0].untyped_storage()._cdata)
            if source is not None and source.category in _INHERITED:
                return source.category
        phase, shape = self._phase(), tuple(tensor.shape)
        if phase == "backward" and shape in self._dense_shapes:
            return "gradients"
        if phase in ("forward", "backward", "probe") and tensor.dim() > 1 and self._vocabulary in shape:
            return "logits"
        return _BY_PHASE[phase]

    def _see_inputs(self, func: Any, inputs: list[Tensor]) -> None:
        """Take up storages that were made unseen, and tell the buffers of FSDP's collectives by the operation."""
        name = str(func)
        collective = None
        if name.startswith(("fsdp.", "c10d.", "_c10d_functional.")) and phases.current_phase() is None:
            if any(part in name for part in _GATHERS):
                collective = "weights"
            elif any(part in name for part in _REDUCTIONS):
                collective = "gradients"
        for tensor in inputs:
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            record = self._records.get(storage._cdata)
            if record is None:
                # Token ids and masks that were there before; anything else has no known origin.
                record = self._see(storage, "other" if tensor.is_floating_point() else "rollout")
            if collective is not None and record is not None and not record.owned:
                record.category = collective

    # ---- storages ----

    def _see(self, storage: torch.UntypedStorage, category: str) -> _Record | None:
        key = storage._cdata
        record = self._records.get(key)
        if record is not None or storage.device.type not in (self._device_type, "meta"):
            return record
        self._records[key] = record = _Record(category, storage.nbytes(), owned=False)
        record.reference = weakref.ref(storage, lambda _: self._on_death(key, record))
        self._timeline.add(record, record.num_bytes, self._phase())
        return record

    def _on_death(self, key: int, record: _Record) -> None:
        if self._records.get(key) is record:
            del self._records[key]
            self._timeline.add(record, -record.num_bytes, self._phase())

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        record = self._records.get(storage._cdata)
        if record is not None and storage.nbytes() != record.num_bytes:
            change, record.num_bytes = storage.nbytes() - record.num_bytes, storage.nbytes()
            self._timeline.add(record, change, self._phase())

    def _enter_step(self, *_: Any) -> None:
        self.sweep()
        self._in_optimizer += 1

    def _leave_step(self, *_: Any) -> None:
        self.sweep()
        self._in_optimizer -= 1


def _is_getter(optimizer: Any) -> bool:
    return callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)


def _sketched(optimizer: Any) -> set[int]:
    return {id(weight) for target in getattr(optimizer, "targets", ()) for weight in (target.parameter, target.stored)}


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class _resizing:
    """Inside, `report` hears of every storage that is resized, which no operation tells (FSDP frees and refills so)."""

    def __init__(self, report: Callable[[torch.UntypedStorage], None]) -> None:
        self._report = report

    def __enter__(self) -> None:
        original = self._original = torch.UntypedStorage.resize_
        report = self._report

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            report(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]

    def __exit__(self, *exc: Any) -> None:
        torch.UntypedStorage.resize_ = self._original  # type: ignore[method-assign]
