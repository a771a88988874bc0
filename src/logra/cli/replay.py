"""`logra replay`: the weights of any step of a run, from its base model and its log of updates.

Every step is a checkpoint at the price of a packet. The command rebuilds one (--output), checks the whole chain (--verify)
or says which weights moved how far between two (--compare).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logra.errors import ConfigError, LograError
from logra.rl.default_model import MODEL_ID, default_model_path
from logra.sync import DirectoryLog, Manifest, Replica
from logra.sync.durable import try_writing
from logra.sync.log import MANIFEST

DESCRIPTION = "Rebuild, check or compare the weights of a run at any step, from its base model and its log of updates."


def replay_command(arguments: Sequence[str]) -> int:
    """Run `logra replay`.

    Args:
        arguments: those after the command's name.

    Returns:
        The exit code.

    Raises:
        LograError: the run, its log or the base model cannot be used, or the chain is broken.
        SystemExit: --help, or flags that cannot be parsed.
    """
    parser = argparse.ArgumentParser(prog="logra replay", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, or of its log", metavar="DIR")
    parser.add_argument("--step", type=int, help="policy version: the number of updates applied", metavar="K")
    parser.add_argument("--output", type=Path, help="write the weights of step K here, as a Hugging Face folder")
    parser.add_argument("--verify", action="store_true", help="apply every update and check every digest and anchor")
    parser.add_argument(
        "--compare", type=int, help="print how far each weight moved between steps J and K", metavar="J"
    )
    parser.add_argument("--base", help="where the base model lies now (default: where the log says)", metavar="MODEL")
    options = parser.parse_args(arguments)
    return replay(options.run, options.step, options.output, options.verify, options.compare, base=options.base)


def replay(
    run: Path,
    step: int | None = None,
    output: Path | None = None,
    verify: bool = False,
    compare: int | None = None,
    *,
    base: str | None = None,
) -> int:
    """Rebuild, check or compare weights of a run.

    Args:
        run: folder of the run (with `updates/` in it), or of the log.
        step: policy version to rebuild.
        output: folder for the rebuilt model, fp32; new or empty.
        verify: check the whole chain first.
        compare: another version; print ‖ΔW‖ / ‖W‖ of every weight between the two.
        base: folder or hub id of the base model; None takes the log's.

    Returns:
        0.

    Raises:
        ConfigError: options that do not go together, or an output folder that is taken.
        LograError: the log or the base model cannot be used, or the chain is broken.
    """
    if step is None and (output is not None or compare is not None):
        raise ConfigError("replay: --output and --compare need --step")
    if not verify and output is None and compare is None:
        raise ConfigError("replay: nothing to do: give --output, --compare or --verify")
    if output is not None:
        _require_free(output)
    log = _open_log(run)
    manifest = log.manifest
    assert manifest is not None
    _check_versions(log, manifest, step, compare)
    location = _base_location(manifest, base)
    if output is not None:
        try:
            try_writing(output)
        except OSError as error:
            raise ConfigError(f"output={str(output)!r} cannot be created: {error}. Choose another folder") from error
    if verify:
        _verify(log, _load(location, manifest))
    if step is not None and compare is not None:
        _compare(log, _load(location, manifest), manifest, compare, step)
    if step is not None and output is not None:
        _rebuild(log, _load(location, manifest), location, manifest, step, output)
    return 0


def _require_free(output: Path) -> None:
    try:
        taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    except OSError as error:
        raise ConfigError(f"output={str(output)!r} cannot be used: {error}. Choose another folder") from error
    if taken:
        raise ConfigError(f"output={str(output)!r}: must be a new or an empty folder")


def _open_log(run: Path) -> DirectoryLog:
    folder = run / "updates" if (run / "updates").is_dir() else run
    if not (folder / MANIFEST).is_file():  # a log would be begun here, or refuse to be
        raise ConfigError(
            f"run={str(run)!r}: there is no log of updates in it. Give the --output-dir of `logra train` with method logra "
            f"or paper (the other methods write no log), or the folder of a log, which holds {MANIFEST}"
        )
    return DirectoryLog(folder)


def _check_versions(log: DirectoryLog, manifest: Manifest, *versions: int | None) -> None:
    first, last = manifest.base.version, log.latest()
    for version in versions:
        if version is not None and not first <= version <= last:
            raise ConfigError(
                f"step {version}: the log holds steps {first} to {last} (a step that was skipped has no update)"
            )


def _base_location(manifest: Manifest, base: str | None) -> str:
    location = base or manifest.base.model
    if location is None:
        raise ConfigError("the log does not say what its base model is: give --base")
    return str(default_model_path()) if location.lower() == MODEL_ID else location


def _load(location: str, manifest: Manifest) -> Any:
    """The base model in fp32, with the values that the trainer began from."""
    from logra.rl.pretrained import load_causal_lm

    trained = torch.float32 if manifest.weight_storage == "fp32" else torch.bfloat16
    revision = {} if Path(location).is_dir() or manifest.base.revision is None else {"revision": manifest.base.revision}
    advice = ". If it has moved, give --base"
    model = load_causal_lm(f"base model {location!r}", location, advice=advice, dtype=trained, **revision)
    return model.to(torch.float32)


def _verify(log: DirectoryLog, model: Any) -> None:
    replica = Replica(model, version=_base_version(log))
    replica.catch_up(log, until=replica.version)  # checks the base model
    anchors, digests = 0, int(replica.verified_version is not None)
    try:
        for update in log.read_since(replica.version):
            replica.apply(update)
            digests += update.weights_digest is not None
            if log.latest_anchor(update.version) == update.version:
                _check_anchor(log.read_anchor(update.version), replica)
                anchors += 1
    except LograError:
        print(f"The chain holds up to step {replica.version} of {log.latest()} and breaks there.")
        raise
    print(
        f"Steps {_base_version(log)} to {replica.version}: every update applies. "
        f"{digests} digests of the weights and {anchors} anchors agree."
    )
    if replica.verified_version is None:
        print("The log holds no digests: that the weights are the trainer's was not checked.")


def _check_anchor(anchor: dict[str, Tensor], replica: Replica) -> None:
    weights = replica.weights()
    for name, value in anchor.items():
        if name not in weights or not torch.equal(value.float(), weights[name].float()):
            raise LograError(f"the anchor of step {replica.version} does not hold the weights of that step ({name!r})")


def _compare(log: DirectoryLog, model: Any, manifest: Manifest, first: int, second: int) -> None:
    start, stop = sorted((first, second))
    replica = Replica(model, version=manifest.base.version)
    replica.catch_up(log, until=start)
    changed: set[str] = set()
    for update in log.read_since(start):
        if update.version > stop:
            break
        changed |= update.names
    weights = replica.weights()
    before = {name: weights[name].clone() for name in weights if name in changed}
    replica.catch_up(log, until=stop)
    after = replica.weights()
    rows = []
    for name, old in before.items():
        rows.append((name, float((after[name] - old).double().norm()), float(old.double().norm())))
    rows.sort(key=lambda row: -_ratio(row[1], row[2]))
    total_change = sum(change**2 for _, change, _ in rows) ** 0.5
    total_norm = sum(norm**2 for _, _, norm in rows) ** 0.5
    width = max((len(row[0]) for row in rows), default=0) + 2
    print(f"{f'step {start} to {stop}':{width}}{'‖ΔW‖/‖W‖':>12}{'‖ΔW‖':>12}{'‖W‖':>12}")
    for name, change, norm in [*rows, ("all", total_change, total_norm)]:
        print(f"{name:{width}}{_ratio(change, norm):12.3e}{change:12.3e}{norm:12.3e}")


def _rebuild(log: DirectoryLog, model: Any, location: str, manifest: Manifest, step: int, output: Path) -> None:
    from logra.rl.pretrained import load_tokenizer

    replica = Replica(model, version=manifest.base.version)
    replica.catch_up(log, until=step)
    model.save_pretrained(output)
    try:
        load_tokenizer("its tokenizer", location).save_pretrained(output)
    except ConfigError as error:
        print(f"The base model has no tokenizer that could be copied ({error}).")
    checked = replica.verified_version
    if checked is None:
        print("The log holds no digest up to this step: that these weights are the trainer's was not checked.")
    elif checked == step:
        print("The digest of the weights agrees with the trainer's.")
    else:
        print(f"Step {step} carries no digest; that of step {checked}, the last before it, agrees with the trainer's.")
    print(f"The weights of step {step} lie in {output}")


def _base_version(log: DirectoryLog) -> int:
    assert log.manifest is not None
    return log.manifest.base.version


def _ratio(change: float, norm: float) -> float:
    return change / norm if norm > 0 else float("inf") if change > 0 else 0.0
