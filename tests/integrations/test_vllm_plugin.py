"""What vLLM loads into each of its processes, seen from outside of vLLM."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import logra
from logra.integrations.vllm import plain_linear, plugin

ROOT = Path(__file__).parents[2]


class Factory:
    """`WeightTransferEngineFactory` as vLLM 0.28 and later have it."""

    def __init__(self):
        self.registry = {}
        self.create_engine = lambda config, vllm_config, device, model: None

    def register_engine(self, name, module, class_name):
        if name in self.registry:
            raise ValueError("already registered")
        self.registry[name] = (module, class_name)


@pytest.fixture
def vllm(monkeypatch):
    """Stand-ins for the modules of vLLM that the plugin looks at."""
    factory = Factory()
    modules = {
        "vllm": ModuleType("vllm"),
        "vllm.distributed": ModuleType("vllm.distributed"),
        "vllm.distributed.weight_transfer": ModuleType("vllm.distributed.weight_transfer"),
        "vllm.platforms": ModuleType("vllm.platforms"),
    }
    transfer = modules["vllm.distributed.weight_transfer"]
    transfer.factory = SimpleNamespace(WeightTransferEngineFactory=factory)  # type: ignore[attr-defined]
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: False)  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(factory=factory, modules=modules)


def test_the_entry_point_leads_to_the_plugin():
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = entry_points["vllm.general_plugins"]["logra"].partition(":")
    assert (module, name) == (plugin.__name__, plugin.register.__name__)


def test_registering_twice_registers_once(vllm):
    plugin.register()
    plugin.register()
    assert vllm.factory.registry == {"logra": ("logra.integrations.vllm.transfer_engine", "LograTransferEngine")}


def test_a_vllm_whose_backends_do_not_get_the_model_is_left_alone(vllm):
    vllm.factory.create_engine = lambda config, parallel_config: None
    plugin.register()
    assert vllm.factory.registry == {}


def test_a_vllm_without_backends_is_left_alone(vllm, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", None)
    plugin.register()


def test_nothing_that_goes_wrong_stops_vllm(vllm, caplog):
    vllm.modules["vllm.platforms"].current_platform = None
    plugin.register()
    assert "not available in this vLLM" in caplog.text


def test_the_package_needs_no_vllm():
    code = (
        "import sys, logra.integrations.vllm as v\n"
        "[getattr(v, name) for name in v.__all__]\n"
        "assert 'vllm' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plugin_waits_for_the_kernels_of_the_cpu_build(vllm, monkeypatch, tmp_path):
    # Catches an import of seconds in processes that never load a model.
    (tmp_path / "utils.py").write_text(
        "def dispatch_cpu_unquantized_gemm(layer, remove_weight):\n    layer.packed = 1\n"
    )
    layers = ModuleType("vllm.model_executor.layers")
    layers.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "vllm.model_executor", ModuleType("vllm.model_executor"))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers", layers)
    vllm.modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: True)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    name = "vllm.model_executor.layers.utils"
    monkeypatch.delitem(sys.modules, name, raising=False)
    finders = len(sys.meta_path)
    plugin.register()
    assert name not in sys.modules
    kernels = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, kernels)
    assert hasattr(kernels.dispatch_cpu_unquantized_gemm, plain_linear._MARK)
    assert len(sys.meta_path) == finders
    replaced = kernels.dispatch_cpu_unquantized_gemm
    plugin.register()  # again, with the module loaded
    assert kernels.dispatch_cpu_unquantized_gemm is replaced


def test_unknown_names_are_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        logra.integrations.vllm.Nothing  # type: ignore[attr-defined]  # noqa: B018


def layer(shape=(6, 4), device="cpu"):
    return SimpleNamespace(weight=torch.randn(shape, device=device))


def test_only_matrices_of_followers_stay_plain():
    # Catches an engine that does not use logra and loses its packed kernels, and 3-D weights with kernels of their own.
    packed = []
    for is_follower in (True, False):
        dispatch = plain_linear.choosing(
            lambda layer, remove: packed.append(layer), lambda follows=is_follower: follows
        )
        for candidate in (layer(), layer((3, 2, 4)), layer(device="meta")):
            dispatch(candidate, True)
            is_plain = is_follower and candidate.weight.ndim == 2 and not candidate.weight.is_meta
            assert hasattr(candidate, "cpu_linear") is is_plain
            assert any(candidate is item for item in packed) is not is_plain


@pytest.mark.parametrize("bias", [None, torch.randn(6)])
def test_the_plain_product_reads_the_weight_as_it_is_now(bias):
    # Catches a kernel that keeps a packed copy: it would answer with the old weight.
    chosen = layer()
    plain_linear.choosing(lambda *_: None, lambda: True)(chosen, True)
    x = torch.randn(3, 4)
    for _ in range(2):
        expected = F.linear(x.double(), chosen.weight.double(), None if bias is None else bias.double())
        actual = chosen.cpu_linear(x, chosen.weight, bias)
        assert torch.allclose(actual.double(), expected, atol=1e-5)  # fp32 sums of 4 products of order 1
        chosen.weight.mul_(3)


@pytest.mark.parametrize(
    ("backend", "extension", "follows"),
    [
        ("logra", "", True),
        ("nccl", "", False),
        (None, "", False),
        (None, plugin.EXTENSION, True),
        (None, "another.Extension", False),
    ],
)
def test_engines_follow_if_they_were_built_to(backend, extension, follows):
    transfer = None if backend is None else SimpleNamespace(backend=backend)
    parallel = SimpleNamespace(worker_extension_cls=extension)
    config = SimpleNamespace(weight_transfer_config=transfer, parallel_config=parallel)
    assert plain_linear.is_follower(config) is follows
