"""Whatever is wrong with a model's folder is a ConfigError that says what, and no code that comes with a model is run."""

import json

import pytest
import transformers

from logra.errors import ConfigError
from logra.rl.config import TrainConfig
from logra.rl.methods import load_model
from logra.rl.pretrained import require_fit
from logra.rl.tasks import Task

CHAT = [{"role": "user", "content": "1 + 1 = ?"}]


def load(folder, prompt="1 +"):
    rows = [{"prompt": prompt}]
    return load_model(
        TrainConfig(model=str(folder), output_dir="unused"), Task("t", rows, [], lambda **_: [], "accuracy")
    )


def change(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_is_neither_run_nor_asked_about(model_folder, file, monkeypatch):
    """Fails if transformers asks on standard input, or imports what lies in the folder."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    (model_folder / "own.py").write_text("raise SystemExit('run')\n")
    own = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", None]}
    change(model_folder / file, model_type="own", tokenizer_class="Own", auto_map=own)
    with pytest.raises(ConfigError, match=r"cannot be loaded: it comes with code of its own .*not supported"):
        load(model_folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": "32"}, "Error: "),
        ({"num_attention_heads": 5}, "Error: "),
        ({"num_attention_heads": 0}, "Error: "),
        ({"hidden_act": "sillu"}, "KeyError: .*sillu"),
    ],
)
def test_settings_that_no_model_has(model_folder, settings, message):
    change(model_folder / "config.json", **settings)
    with pytest.raises(ConfigError, match=rf"(?s)model=.*tiny-model' cannot be loaded: \w*{message}"):
        load(model_folder)


def test_files_that_are_damaged(model_folder):
    (model_folder / "model.safetensors").rename(model_folder / "away")
    (model_folder / "pytorch_model.bin").write_bytes(b"no weights" * 100)
    with pytest.raises(ConfigError, match=r"tiny-model' cannot be loaded: \w+Error: "):
        load(model_folder)
    (model_folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tiny-model' cannot be loaded: \w+Error: "):
        load(model_folder)


def test_what_a_folder_lacks_is_named(model_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"the folder holds no config\.json"):
        load(tmp_path / "empty")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model_folder / name).unlink()
    with pytest.raises(ConfigError, match="the folder holds no tokenizer"):
        load(model_folder)


def test_a_hub_id_that_is_a_mistyped_folder(monkeypatch):
    def offline(*_, **__):
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ConfigError, match="couldn't connect to the hub There is no such folder here either"):
        load("runs/typo")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "roles user: TemplateError: System role not supported"),
        ("{% for message in", "roles user: TemplateSyntaxError"),
    ],
)
def test_a_chat_template_that_fails_is_found_before_the_run_begins(model_folder, template, message):
    (model_folder / "chat_template.jinja").write_text(template)
    load(model_folder)  # text needs no template
    with pytest.raises(ConfigError, match=rf"tiny-model': its tokenizer cannot take .*{message}"):
        load(model_folder, CHAT)


def test_every_order_of_roles_is_tried(model_folder, tokenizer, model):
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}x"
    require_fit("model", model, tokenizer, [CHAT, CHAT])
    with pytest.raises(ConfigError, match="roles system, user: TemplateError: no"):
        require_fit("model", model, tokenizer, [CHAT, [{"role": "system", "content": "be brief"}, *CHAT]])


def test_tokens_that_the_model_lacks_are_found_before_the_run_begins(tokenizer, model):
    model.resize_token_embeddings(tokenizer.convert_tokens_to_ids("9") + 1)
    require_fit("model", model, tokenizer, ["99"])
    with pytest.raises(ConfigError, match=r"gives the token \d+, but the model has embeddings of the tokens 0 to 11"):
        require_fit("model", model, tokenizer, ["99a"])


def test_a_tokenizer_without_an_end_is_refused(tokenizer, model):
    tokenizer.eos_token = tokenizer.pad_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        require_fit("model", model, tokenizer, ["1"])
