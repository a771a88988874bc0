"""Flags and files of `logra train`."""

import pytest
import yaml

import logra
from logra.cli.train import parse
from logra.errors import ConfigError
from logra.rl.config import TrainConfig, preset, to_dict

BASE = ["--output-dir", "x"]


def test_defaults_are_those_of_python():
    assert to_dict(parse(BASE)) == to_dict(TrainConfig(output_dir="x"))


@pytest.mark.parametrize("method", ["logra", "paper", "adamw", "lora"])
def test_the_method_decides_the_defaults(method):
    config = parse([*BASE, "--method", method])
    for group, values in preset(method).items():
        assert to_dict(getattr(config, group)) == to_dict(values)


def test_flags_override_the_preset():
    config = parse([*BASE, "--method=paper", "--logra.rank", "64", "--trust.kl-budget", "0.01"])
    assert config.logra.rank == 64
    assert config.logra.direction == "row_adam"  # the rest of the preset stays
    assert config.trust.kl_budget == 0.01
    assert config.trust.schedule_steps == 300


def test_dashes_and_underscores_are_the_same():
    first = parse([*BASE, "--rollout.num-prompts", "4", "--task-options.min-terms", "3", "--num-heldout=7"])
    second = parse(["--output_dir", "x", "--rollout.num_prompts=4", "--task_options.min_terms=3", "--num_heldout", "7"])
    assert to_dict(first) == to_dict(second)
    assert first.rollout.num_prompts == 4
    assert first.task_options == {"min_terms": 3}


def test_values_keep_their_dashes():
    assert parse([*BASE, "--model", "some-owner/some-model"]).model == "some-owner/some-model"
    assert parse([*BASE, "--model=a-b/c-d"]).model == "a-b/c-d"


def test_overwrite_is_a_switch():
    assert parse([*BASE, "--overwrite"]).overwrite
    assert parse(["--overwrite", *BASE]).overwrite
    assert not parse([*BASE, "--overwrite", "false"]).overwrite
    assert not parse(BASE).overwrite
    assert parse([*BASE, "--profile"]).profile and not parse(BASE).profile


def test_lists_and_nulls():
    config = parse([*BASE, "--logra.target-modules", '["q_proj", "v_proj"]', "--trust.kl-budget-final", "null",
                    "--run.report-to", '["trackio"]'])  # fmt: skip
    assert list(config.logra.target_modules) == ["q_proj", "v_proj"]
    assert config.trust.kl_budget_final is None
    assert config.run.report_to == ("trackio",)


def test_a_file_sits_between_preset_and_flags(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"method": "paper", "logra": {"rank": 16, "lr": 1e-5}, "run": {"num_steps": 3}}))
    config = parse([*BASE, "--config", str(path), "--logra.lr", "2e-5"])
    assert config.method == "paper"
    assert config.logra.restore_norm  # from the preset that the file asks for
    assert config.logra.rank == 16
    assert config.logra.lr == 2e-5
    assert config.run.num_steps == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"method: paper\nlogra:\n  rank: [1\nrun: 3\n", "bad.yaml', line 4: not YAML"),
        (b"\xff\xfe", "cannot be read"),
        (b"- 1\n", "holds a list"),
        (b"", "holds nothing"),
        (b"method: [1]\n", "one of logra, paper"),
        (b"rollout: 5\n", "rollout=5, but rollout is a group"),
        (b"logra: [1]\n", "logra=[1], but logra is a group"),
        (b"trust:\n", "trust=None, but trust is a group"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        parse([*BASE, "--config", str(path)])
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        parse([*BASE, "--config", str(tmp_path / "missing.yaml")])


@pytest.mark.parametrize("method", ["logra", "adamw"])
def test_a_written_configuration_is_read_back(tmp_path, method):
    from logra.rl.run_folder import RunFolder

    original = parse([*BASE, "--method", method, "--rollout.temperature", "0.5", "--task-options.min_terms", "3"])
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_config(original)
    again = parse(["--config", str(folder.config)])
    assert to_dict(again) == to_dict(original)


def test_help_shows_defaults_and_units(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help", "--method", "paper"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--rollout.max-new-tokens" in shown
    assert "Longest completion, tokens. (type: int, default: 12)" in shown
    assert "nats per generated token" in shown
    # The defaults shown are those of the method asked for.
    assert f"default: {logra.Config.paper().rank})" in shown
    assert "--logra.trust" not in shown


@pytest.mark.parametrize("flag", ["--metho", "--conf", "--logra.ran"])
def test_flags_are_not_abbreviated(flag, tmp_path):
    """Fails if an abbreviation sets the method where the preset is not looked for: the default one ran by its name."""
    path = tmp_path / "run.yaml"
    path.write_text("method: paper\n")
    value = {"--metho": "paper", "--conf": str(path), "--logra.ran": "8"}[flag]
    with pytest.raises(SystemExit) as stop:
        parse([*BASE, flag, value])
    assert stop.value.code == 2


def test_the_preset_is_that_of_the_last_file_with_a_method(tmp_path):
    paths = [tmp_path / f"{name}.yaml" for name in ("first", "second", "third")]
    for path, content in zip(paths, ("method: adamw\n", "method: paper\n", "run: {num_steps: 4}\n"), strict=True):
        path.write_text(content)
    config = parse([*BASE, *(f"--config={path}" for path in paths)])
    assert config.method == "paper"
    assert to_dict(config.logra) == to_dict(preset("paper")["logra"])
    assert config.run.num_steps == 4
    flagged = parse([*BASE, "--method", "logra", *(f"--config={path}" for path in paths[1:])])
    assert flagged.method == "logra"
    assert to_dict(flagged.logra) == to_dict(preset("logra")["logra"])


def test_flags_override_a_file_that_follows(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("logra: {rank: 16}\n")
    assert parse([*BASE, "--logra.rank", "8", "--config", str(path)]).logra.rank == 8


def test_diagnostics():
    config = parse([*BASE, "--diagnostics.direction-every", "5", "--diagnostics.direction_layers", "4",
                    "--diagnostics.collateral_every=5"]).diagnostics  # fmt: skip
    assert (config.direction_every, config.direction_layers, config.collateral_every) == (5, 4, 5)
    named = parse(
        [*BASE, "--diagnostics.direction_every=1", "--diagnostics.direction_layers", '["a.q_proj", "b.k_proj"]']
    )
    assert named.diagnostics.direction_layers == ("a.q_proj", "b.k_proj")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["direction-every", "-1"], r"diagnostics.direction_every=-1: an integer of at least 0"),
        (["num-responses", "0"], r"diagnostics.num_responses=0: an integer of at least 1"),
        (["direction-every", "1", "direction-layers", "0"], r"diagnostics.direction_layers=0: a number of layers"),
        (["direction-layers", "2"], r"direction_layers=2: has no effect with diagnostics.direction_every=0"),
        (["collateral-file", "x"], r"collateral_file='x': has no effect with diagnostics.collateral_every=0"),
    ],
)
def test_diagnostics_that_cannot_work_are_refused(flags, message):
    arguments = [f"--diagnostics.{flag}" if index % 2 == 0 else flag for index, flag in enumerate(flags)]
    with pytest.raises(ConfigError, match=message):
        parse([*BASE, *arguments])


def test_diagnostics_belong_to_sketches():
    with pytest.raises(ConfigError, match="diagnostics: method=adamw makes no sketches"):
        parse([*BASE, "--method", "adamw", "--diagnostics.direction-every", "1"])
