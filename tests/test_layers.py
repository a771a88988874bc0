"""Imports point down, packages of one level do not import each other, and `import logra` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import logra

ROOT = Path(logra.__file__).parent
LEVELS = {
    "chunked_head": 0, "planner": 3,
    "update": 0, "errors": 0, "hashing": 0, "distributed": 0, "contracts": 0, "rounding": 0, "packet": 0,
    "sign_factor": 0, "storage": 0, "merge_rule": 0, "shards": 0, "tensor_delta": 0,
    "phases": 0, "powers": 0,
    "sketch": 1, "memory": 1,
    "optim": 2, "trust": 2, "sync": 2,
    "checkpoint": 2.5,  # saves the state of `optim`, and is used by `rl`
    "diagnostics": 2.5,  # looks at steps through `trust`, and is used by `rl`
    "rl": 3,
    "integrations": 4, "report": 4,
    "bench": 4.5,  # measures what is in `integrations`
    "cli": 5,
}  # fmt: skip
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def logra_imports(path: Path) -> set[str]:
    """Parts of logra that a file imports, anywhere in it (also inside functions)."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("logra.")}
    return parts


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    own = part_of(path)
    assert own in LEVELS, f"{own} has no level: add it to the table of this test and to the design"
    for part in logra_imports(path) - {own}:
        # Level 0 is one level of single files that may use each other; everything else must look strictly down.
        allowed = part in LEVELS and (LEVELS[part] < LEVELS[own] or LEVELS[own] == LEVELS[part] == 0)
        assert allowed or part == "__version__", f"{path.name} of {own!r} imports {part!r}"


def test_import_logra_needs_torch_alone():
    code = (
        "import sys, logra\n"
        "heavy = {'transformers', 'trl', 'vllm', 'ray', 'matplotlib', 'datasets', 'peft', 'accelerate'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_documented():
    for name in logra.__all__:
        if name != "__version__":
            assert getattr(logra, name).__doc__, name
