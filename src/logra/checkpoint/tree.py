"""Nested state (dicts, lists, tuples, scalars, tensors) as a JSON text and named tensors, and back, exactly.

What JSON has, stays as it is. The rest is an object with one reserved key:

    {"$tensor": name}              a tensor, stored under that name
    {"$tuple": [...]}              a tuple
    {"$dict": [[key, value], ...]} a dict with keys that are not texts, or with a reserved one
    {"$float": "nan"}              a float that JSON does not have: nan, inf, -inf

Refuses everything else with `LograError`: a checkpoint holds data, never objects.
"""

import json
import math
from typing import Any

from torch import Tensor

from logra.errors import LograError

_RESERVED = ("$tensor", "$tuple", "$dict", "$float")


def encode(state: Any) -> tuple[str, dict[str, Tensor]]:
    """The JSON text and the tensors of a nested state.

    Raises:
        LograError: it holds something that is neither a plain value nor a tensor.
    """
    tensors: dict[str, Tensor] = {}
    return json.dumps(_encode(state, "state", tensors), allow_nan=False), tensors


def decode(text: str, tensors: dict[str, Tensor]) -> Any:
    """The nested state of a JSON text and its tensors.

    Raises:
        LograError: the text is no JSON, or names a tensor that is not there.
    """
    try:
        return _decode(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LograError(f"the state of the checkpoint cannot be read: {error!r}") from error


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    # Exact types: a numpy scalar or an enum would come back as something else.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not any(key in value for key in _RESERVED):
            return {key: _encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
        return {"$dict": [[_encode(key, path, {}), _encode(item, f"{path}.{key}", tensors)]
                          for key, item in value.items()]}  # fmt: skip
    raise LograError(
        f"{path} is a {type(value).__name__}: a checkpoint holds tensors, texts, numbers and lists of them"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (kind, content), *_ = value.items()
        if kind == "$tensor":
            return tensors[content]
        if kind == "$tuple":
            return tuple(_decode(item, tensors) for item in content)
        if kind == "$dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
        if kind == "$float":
            return float(content)
    return {key: _decode(item, tensors) for key, item in value.items()}
