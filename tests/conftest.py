"""Small modules that the tests of several packages share."""

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from workers import Workers

# Examples have no deadline of their own: on a busy machine it fails at random, and tests have a timeout.
settings.register_profile("logra", deadline=None)
settings.load_profile("logra")


@pytest.fixture(scope="session")
def workers():
    """Runs tasks in several processes; starts once a session."""
    started = Workers()
    yield started
    started.stop()


class Block(nn.Module):
    """Attention-like siblings that read one tensor, and a down projection with its own input."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, inner, bias=bias)
        self.k_proj = nn.Linear(width, inner // 2, bias=bias)
        self.o_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k = self.k_proj(x)
        return x + self.o_proj(torch.tanh(self.q_proj(x)) * torch.sigmoid(torch.cat([k, k], dim=-1)))


class TinyLM(nn.Module):
    """A causal-free toy language model over token ids: [batch, tokens] -> logits [batch, tokens, vocab]."""

    def __init__(
        self, vocab: int = 23, width: int = 40, inner: int = 56, layers: int = 2, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width, inner, bias=bias) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


@pytest.fixture
def make_lm():
    """Builds seeded toy models."""

    def make(seed: int = 0, **kwargs) -> TinyLM:
        torch.manual_seed(seed)
        return TinyLM(**kwargs)

    return make


@pytest.fixture
def tiny_lm(make_lm) -> TinyLM:
    """A seeded toy model with targets q_proj, k_proj [.., 40] and o_proj [40, 56] in two blocks."""
    return make_lm()


@pytest.fixture
def token_ids() -> torch.Tensor:
    """Token ids [4, 11] for the toy model."""
    return torch.randint(0, 23, (4, 11), generator=torch.Generator().manual_seed(1))


class RecordShapes(TorchDispatchMode):
    """Records the shape of every tensor that an operation allocates."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {
            a.untyped_storage().data_ptr()
            for a in torch.utils._pytree.tree_leaves((args, kwargs))
            if torch.is_tensor(a)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.shapes.add(tuple(tensor.shape))
        return result


@pytest.fixture
def record_shapes() -> type[RecordShapes]:
    """A mode that records the shape of every allocated tensor."""
    return RecordShapes
