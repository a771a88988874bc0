"""What a vLLM engine says about a fixed prompt, in numbers that can be compared bit for bit.

As a script: builds a fresh engine from a folder and prints its answer as JSON.

    python engine_probe.py MODEL DTYPE SETTINGS
"""

import gc
import json
import os
import socket
import sys
from typing import Any

PROMPT = list(range(100, 196))  # three blocks of the prefix cache, two of which a second request reads
NUM_TOKENS = 12
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # for engines that TRL builds
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def build_engine(model: str, dtype: str = "float32", **options: Any) -> Any:
    """A small engine. All engines that are compared have these settings."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    settings = {
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 2**26,
    }
    return LLM(model=model, dtype=dtype, **(settings | options))


def close(llm: Any) -> None:
    """Free the memory of an engine; the caller drops its own references."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def ask(llm: Any) -> dict[str, list]:
    """Greedy tokens and their log-probabilities, and the log-probabilities of the prompt."""
    from vllm import SamplingParams

    def generate(**settings: Any) -> Any:
        params = SamplingParams(temperature=0, ignore_eos=True, **settings)
        return llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]

    # Two requests: one that asks for the prompt's log-probabilities does not read the prefix cache.
    completion = generate(max_tokens=NUM_TOKENS, logprobs=0).outputs[0]
    prompt = generate(max_tokens=1, prompt_logprobs=0).prompt_logprobs
    return {
        "token_ids": list(completion.token_ids),
        "logprobs": [next(iter(entry.values())).logprob for entry in completion.logprobs],
        "prompt_logprobs": [entry[token].logprob for token, entry in zip(PROMPT, prompt, strict=True) if entry],
    }


if __name__ == "__main__":
    # The same kernels as in an engine that follows updates: those that read plain weights.
    model, dtype, settings = sys.argv[1:]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    engine = build_engine(model, dtype, weight_transfer_config={"backend": "logra"}, **json.loads(settings))
    print("ANSWER " + json.dumps(ask(engine)))
