"""`logra plan` on the command line."""

import json

import pytest

from logra.cli.main import main


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "tie_word_embeddings": True,
    }))  # fmt: skip
    return str(path)


def test_json_has_every_method_and_category(config, capsys):
    arguments = [
        "plan",
        "--model",
        config,
        "--seq-len",
        "16",
        "--method",
        "adamw",
        "lora",
        "--gpu-memory",
        "1GB",
        "--json",
    ]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == config and result["num_gpus"] == 1 and set(result["methods"]) == {"adamw", "lora"}
    for method in result["methods"].values():
        assert method["fits"] is True
        assert method["peak_bytes"] == sum(method["at_peak"].values())
        assert {"weights", "gradients", "optimizer_state", "sketches", "activations"} <= set(method["resident"])
    whole = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert result["methods"]["adamw"]["resident"]["weights"] == whole


def test_a_plan_that_does_not_fit_is_exit_code_1(config, capsys):
    assert main(["plan", "--model", config, "--seq-len", "16", "--method", "adamw", "--gpu-memory", "1KB"]) == 1
    output = capsys.readouterr().out
    assert "adamw: does not fit" in output and "missing" in output and "arrays alone" in output
    advice = next(line for line in output.splitlines() if line.startswith("To need less: "))
    # Not what these options have already, nor what cannot help: weights alone are too large, and AdamW has no sketches.
    assert advice == "To need less: --method logra, more --num-gpus, a smaller model." and "no sequence" in output


def test_advice_for_a_plan_that_does_not_fit_names_the_options_that_can_shrink(config, capsys):
    arguments = ["plan", "--model", config, "--seq-len", "16", "--method", "logra", "--gpu-memory", "1KB"]
    assert main([*arguments, "--micro-batch", "2", "--whole-logits"]) == 1
    advice = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("To need less: "))
    for option in ("leave out --whole-logits", "--weight-storage split24 (logra)", "a smaller --micro-batch"):
        assert option in advice


@pytest.fixture
def sharded_tied_head(config, monkeypatch):
    """A plan that is refused for dense AdamW alone: logits in three chunks."""
    monkeypatch.setattr("logra.cli.plan._num_cores", lambda: 1)  # another process would not have these chunks
    monkeypatch.setattr("logra.chunked_head.CHUNK_BYTES", 4 * 4 * 99)  # 4 of 12 scored tokens
    return ["plan", "--model", config, "--num-gpus", "2", "--seq-len", "16", "--gpu-memory", "1GB", "--no-trust"]


def test_a_refused_method_that_nobody_named_is_shown_beside_the_others(sharded_tied_head, capsys):
    """Fails if the default list ends with the error of one method."""
    assert main(sharded_tied_head) == 0
    lines = capsys.readouterr().out.splitlines()
    (reason,) = (line for line in lines if line.startswith("adamw: "))
    assert reason.startswith("adamw: refused. ") and "is its embedding" in reason and "--whole-logits" in reason
    (heads,) = (line for line in lines if line.startswith("at the peak"))
    assert heads.split() == ["at", "the", "peak", "logra", "adamw", "(refused)", "lora", "paper"]
    assert sum(": fits, " in line for line in lines) == 3


def test_a_refused_method_that_was_named_is_exit_code_1_beside_others_and_an_error_alone(sharded_tied_head, capsys):
    """Fails if a script that names a method is not told that there is no plan of it."""
    assert main([*sharded_tied_head, "--json", "--method", "adamw", "lora"]) == 1
    found = json.loads(capsys.readouterr().out)["methods"]
    assert "is its embedding" in found["adamw"]["refused"] and found["lora"]["fits"] is True
    assert main([*sharded_tied_head, "--json", "--method", "adamw"]) == 2
    output, error = capsys.readouterr()
    assert error.startswith("logra plan: error: method=adamw with num_gpus=2: the head") and not output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nonsense"], "model='nonsense'"),
        (["--model", "~nobody-here/m"], "model='~nobody-here/m'"),
        (["--model", "qwen2.5-7b", "--gpu-memory", "80"], "gpu_memory='80'"),
        (["--model", "qwen2.5-7b", "--num-gpus", "many"], "--num-gpus"),
        ([], "--model"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, named, capsys):
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error and error.startswith("logra plan: error:") and error.count("\n") == 1
