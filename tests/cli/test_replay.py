"""`logra replay`: the folder it writes holds the trainer's bits, and a broken chain is not hidden."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from logra import SketchOptimizer
from logra.cli.replay import replay, replay_command
from logra.errors import ConfigError, LograError
from logra.sync import DirectoryLog, Publisher
from logra.sync.publisher import optimizer_layout

NUM_STEPS = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with a tokenizer, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True, initializer_range=0.2,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    return folder


class Trained:
    """A run in a folder, and the weights it had after every step."""

    def __init__(self, folder, base, storage, **publishing) -> None:
        self.folder = folder
        dtype, others = (torch.float32, "adamw") if storage == "fp32" else (torch.bfloat16, "freeze")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        opt = SketchOptimizer(model, lr=2e-2, rank=4, weight_storage=storage, non_target=others, non_target_lr=1e-3)
        self.log = DirectoryLog(folder / "updates")
        publisher = Publisher(self.log, opt, base_model=str(base), **publishing)
        ids = torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(0))
        self.weights = [self._weights(opt)]
        for _ in range(NUM_STEPS):
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            publisher.publish(opt.last_update)
            opt.zero_grad()
            self.weights.append(self._weights(opt))

    @staticmethod
    def _weights(opt):
        return {
            name: placement.pieces[0].value(0, placement.matrix_shape[0]).view(placement.shape).clone()
            for name, placement in optimizer_layout(opt).items()
        }


@pytest.fixture(scope="module", params=["fp32", "split32", "split24"])
def trained(request, tmp_path_factory, base):
    return Trained(tmp_path_factory.mktemp("run"), base, request.param, digest_every=2, anchor_every=3)


def assert_holds(folder, weights) -> None:
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name].view(torch.int32), value.contiguous().view(torch.int32)), name


@pytest.mark.parametrize("step", [0, 3, 4, 5])
def test_any_step_can_be_rebuilt(trained, tmp_path, capsys, step):
    # Catches a step that is one off, a base that is loaded with other values than the trainer's, lost low bits, and
    # changed non-targets that are forgotten.
    output = tmp_path / "model"
    assert replay_command(["--run", str(trained.folder), "--step", str(step), "--output", str(output)]) == 0
    assert_holds(output, trained.weights[step])
    assert AutoTokenizer.from_pretrained(output)("a").input_ids == [2]
    text = capsys.readouterr().out
    expected = {0: "agrees", 3: "that of step 2", 4: "agrees", 5: "that of step 4"}
    assert expected[step] in text and str(output) in text


def test_the_chain_can_be_verified(trained, capsys):
    assert replay(trained.folder / "updates", verify=True) == 0
    assert (
        "Steps 0 to 5: every update applies. 3 digests of the weights and 1 anchors agree." in capsys.readouterr().out
    )


def test_how_far_each_weight_moved(trained, capsys):
    # Catches steps that are exchanged, the norm of the wrong weight, and weights that are left out.
    assert replay(trained.folder, step=4, compare=3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 3 to 4" in lines[0]
    rows = {line.split()[0]: [float(number) for number in line.split()[1:]] for line in lines[1:]}
    before, after = trained.weights[3], trained.weights[4]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert rows.keys() == moved | {"all"}
    assert "model.layers.1.mlp.down_proj.weight" in rows
    for name, (ratio, change, norm) in rows.items():
        names = moved if name == "all" else [name]
        expected_change = sum(float((after[n] - before[n]).double().norm()) ** 2 for n in names) ** 0.5
        expected_norm = sum(float(before[n].double().norm()) ** 2 for n in names) ** 0.5
        # Printed with four digits.
        assert change == pytest.approx(expected_change, rel=1e-3)
        assert norm == pytest.approx(expected_norm, rel=1e-3)
        assert ratio == pytest.approx(expected_change / expected_norm, rel=1e-3)
    ratios = [row[0] for name, row in rows.items() if name != "all"]
    assert ratios == sorted(ratios, reverse=True)


@pytest.fixture
def broken(tmp_path, base):
    """A run of its own, to be damaged."""
    return Trained(tmp_path / "run", base, "fp32", digest_every=2, anchor_every=3)


def test_a_broken_chain_is_reported(broken, tmp_path, capsys):
    path = broken.log.path / "000000000004.update"
    data = bytearray(path.read_bytes())
    data[300] ^= 16
    path.write_bytes(bytes(data))
    with pytest.raises(LograError, match="seal"):
        replay(broken.folder, verify=True)
    assert "holds up to step 3 of 5 and breaks there" in capsys.readouterr().out
    with pytest.raises(LograError, match="seal"):
        replay(broken.folder, step=5, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_base_model_is_refused(broken, base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight[3] += 0.1
    other = tmp_path / "other"
    model.save_pretrained(other)
    with pytest.raises(LograError, match="another model or revision"):
        replay(broken.folder, verify=True, base=str(other))
    with pytest.raises(LograError, match="cannot be loaded"):
        replay(broken.folder, verify=True, base=str(tmp_path / "missing"))


def test_an_anchor_with_other_weights_is_found(broken, capsys):
    # Catches an anchor that is only checked against itself.
    path = broken.log.path / "anchors" / "000000000003.safetensors"
    path.unlink()
    broken.log.write_anchor(3, dict(broken.weights[2]))
    with pytest.raises(LograError, match="anchor of step 3"):
        replay(broken.folder, verify=True)


def test_a_log_without_digests_says_so(tmp_path, base, capsys):
    run = Trained(tmp_path / "run", base, "fp32", digest_every=0)
    content = (run.log.path / "manifest.json").read_text()
    manifest = run.log.manifest
    assert manifest is not None and manifest.base.digest is not None
    (run.log.path / "manifest.json").write_text(content.replace(f'"{manifest.base.digest}"', "null"))
    replay(run.folder, verify=True)
    replay(run.folder, step=2, output=tmp_path / "out")
    text = capsys.readouterr().out
    assert "was not checked" in text and "holds no digest up to this step" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to do"),
        ({"step": 3}, "nothing to do"),
        ({"output": "out"}, "need --step"),
        ({"compare": 3}, "need --step"),
        ({"step": 6, "compare": 3}, "step 6: the log holds steps 0 to 5"),
        ({"step": 3, "compare": -1}, "step -1: the log holds steps 0 to 5"),
        ({"step": 3, "output": "taken"}, "new or an empty folder"),
    ],
)
def test_options_that_cannot_work_are_refused(trained, tmp_path, options, message):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    options = copy.copy(options)
    if "output" in options:
        options["output"] = tmp_path / options["output"]
    with pytest.raises(LograError, match=message):
        replay(trained.folder, **options)


def test_folders_without_a_log_are_refused(tmp_path):
    with pytest.raises(LograError, match="no log of updates"):
        replay(tmp_path / "missing", verify=True)
    (tmp_path / "config.yaml").write_text("x")
    with pytest.raises(LograError, match=r"no log of updates.*--output-dir of `logra train`"):
        replay(tmp_path, verify=True)


def test_a_base_model_that_cannot_be_loaded_is_refused(broken, base, tmp_path):
    """Fails if only some of what transformers raises is taken for a damaged model, or if it asks whether to run code."""
    other = tmp_path / "other"
    shutil.copytree(base, other)
    config = json.loads((base / "config.json").read_text())
    for changed, message in (
        ({"num_attention_heads": 0}, r"cannot be loaded: \w+Error: .*give --base"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, "code of its own"),
    ):
        (other / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(ConfigError, match=rf"(?s)base model .*{message}"):
            replay(broken.folder, verify=True, base=str(other))


@pytest.mark.parametrize("place", ["file/x", "file/x/y", "/proc/x", "x" * 300])
def test_an_output_that_cannot_be_created_is_refused_before_the_model_loads(trained, tmp_path, monkeypatch, place):
    (tmp_path / "file").touch()
    monkeypatch.setattr("logra.cli.replay._load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"output=.*Choose another folder"):
        replay(trained.folder, step=3, output=tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_the_output_may_lie_in_folders_to_be_made(trained, tmp_path):
    replay(trained.folder, step=1, output=tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
