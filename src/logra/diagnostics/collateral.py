"""How much does a step disturb what it is not about?

    collateral = predicted KL of the update on unrelated text / predicted KL of the same update on the step's own batch

Both are ½ Var_p(d/tau) of one forward tangent (`logra.trust.measure.predicted_kl`), in nats per token: over all tokens but
the first of every unrelated text, and over the generated tokens of a few responses of the batch. The quotient has no unit
and does not depend on the length of the step; 0.01 means that unrelated text moves by one hundredth of what the task moves.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from logra import distributed
from logra.contracts import StepView
from logra.diagnostics.direction import DEFAULT_NUM_RESPONSES
from logra.diagnostics.observer import Diagnostic, over_processes
from logra.errors import DataError
from logra.trust.measure import predicted_kl
from logra.trust.probe import Probe, build_probe

SEPARATOR = "---"
"""A line with nothing else on it ends a text."""
MAX_TEXT_TOKENS = 256
"""Tokens of one text that are looked at."""


def unrelated_texts(file: str | Path | None = None) -> list[str]:
    """The texts of a file, or the small set of English and Python texts that comes with this package.

    Args:
        file: UTF-8 text file; texts are separated by lines that hold only "---". None for the texts of this package.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or holds no text.
    """
    if file is None:
        content = resources.files("logra.diagnostics").joinpath("unrelated.txt").read_text(encoding="utf-8")
        return _split(content)
    try:
        content = Path(os.path.expanduser(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"unrelated text {str(file)!r} cannot be read as UTF-8 text: {error}") from error
    texts = _split(content)
    if not texts:
        raise DataError(
            f"unrelated text {str(file)!r} holds no text: write texts into it, separated by lines with only {SEPARATOR}"
        )
    return texts


def _split(content: str) -> list[str]:
    texts, lines = [], []
    for line in [*content.splitlines(), SEPARATOR]:
        if line.strip() == SEPARATOR:
            texts.append("\n".join(lines).strip("\n"))
            lines = []
        else:
            lines.append(line)
    return [text for text in texts if text.strip()]


class CollateralProbe(Diagnostic):
    """Measures `direction/collateral`: the KL of each step on unrelated text per unit of its KL on the task.

    Costs, in the steps that are measured, one forward tangent over the texts and one over `num_responses` responses.

    Args:
        texts: what `unrelated_texts` returned, or texts of your own.
        tokenize: text -> token ids, such as `lambda text: tokenizer(text)["input_ids"]`; or a Hugging Face tokenizer.
        every: calls of `step()` from one measurement to the next.
        num_responses: responses of the batch that the on-task KL is measured on.
        seed: draws them.

    Raises:
        ConfigError: a value that is not allowed.
        DataError: no text has two tokens.

    Example:
        >>> probe = logra.diagnostics.CollateralProbe(logra.diagnostics.unrelated_texts(), tokenizer, every=10)
        >>> probe.attach(opt)
        >>> loss.backward()
        >>> probe.set_batch(input_ids=ids, attention_mask=mask, loss_mask=generated)
        >>> opt.step()
        >>> opt.diagnostics()["direction/collateral"]
    """

    def __init__(
        self,
        texts: Sequence[str],
        tokenize: Callable[[str], Any],
        every: int = 10,
        *,
        num_responses: int = DEFAULT_NUM_RESPONSES,
        seed: int = 0,
    ) -> None:
        super().__init__(every=every, num_responses=num_responses, seed=seed)
        self._rows = [ids for text in texts if len(ids := _token_ids(tokenize(text))) >= 2]
        if not self._rows:
            raise DataError(
                f"CollateralProbe: none of the {len(texts)} texts has two tokens, so that one could be predicted"
            )

    def unrelated(self, temperature: float, device: torch.device) -> Probe:
        """The texts as a probe: every token but the first of each is predicted."""
        width = max(len(row) for row in self._rows)
        ids = torch.zeros(len(self._rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(self._rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        predicted = mask.clone()
        predicted[:, 0] = 0
        return build_probe(
            ids.to(device),
            mask.to(device),
            predicted.to(device),
            temperature=temperature,
            min_responses=len(self._rows),
            min_tokens=1,
            max_response_tokens=MAX_TEXT_TOKENS,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def measure(self, view: StepView) -> dict[str, float]:
        """`direction/collateral`, and its denominator and numerator in nats per token."""
        batch = self._batch
        if not distributed.any_process([batch is not None])[0]:
            return {}
        updates = view.update()
        moves = any(bool(update.norm_squared() > 0) or update.decay != 1.0 for update in updates.values())
        if not (moves or view.dense):
            return {}

        def measure(task: Probe) -> list[float]:
            elsewhere = self.unrelated(task.temperature, task.batches[0].input_ids.device)
            return [predicted_kl(view.model, text, updates, view.dense) for text in (task, elsewhere)]

        on_task, elsewhere = over_processes(None if batch is None else functools.partial(measure, batch.probe), 2)
        measured = {"direction/task_kl": on_task, "direction/unrelated_kl": elsewhere}
        return measured | ({"direction/collateral": elsewhere / on_task} if on_task > 0 else {})


def _token_ids(tokenized: Any) -> list[int]:
    ids = tokenized["input_ids"] if isinstance(tokenized, Mapping) or hasattr(tokenized, "input_ids") else tokenized
    return [int(token) for token in ids][:MAX_TEXT_TOKENS]
