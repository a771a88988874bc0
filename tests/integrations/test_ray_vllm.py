"""What a worker with vLLM inside asks of the engine; the engine is played."""

import sys
from types import SimpleNamespace

import pytest

from logra.integrations.ray import vllm_engine
from logra.integrations.ray.messages import Group, WorkerSettings

GENERATION = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": None,
              "repetition_penalty": 1.0, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": [1, 2]}  # fmt: skip


class PlayedLLM:
    def __init__(self, **options):
        self.options = options

    def generate(self, prompts, parameters, use_tqdm):
        return [SimpleNamespace(outputs=list(reversed([  # samples of a request may come in any order
            SimpleNamespace(index=index, token_ids=(*prompt["prompt_token_ids"], settings.seed, index),
                            logprobs=[{7: SimpleNamespace(logprob=-0.5)}, {8: SimpleNamespace(logprob=-index)}])
            for index in range(settings.n)
        ]))) for prompt, settings in zip(prompts, parameters, strict=True)]  # fmt: skip


class PlayedClient:
    def __init__(self, llm):
        self.pushed = []

    def attach(self, manifest):
        return manifest.base.version

    def push(self, update):
        self.pushed.append(update.version)
        return update.version


@pytest.fixture
def sampler(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=PlayedLLM, SamplingParams=SimpleNamespace))
    monkeypatch.setattr(vllm_engine, "engine_options", lambda: {"worker_extension_cls": "extension"})
    monkeypatch.setattr(vllm_engine, "VLLMEngine", PlayedClient)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    settings = WorkerSettings(engine="vllm", model="folder", generation=GENERATION, autocast=True, max_model_len=64)
    return vllm_engine.VLLMSampler(settings, SimpleNamespace(base=SimpleNamespace(version=2)))


def test_the_engine_computes_as_the_trainer_and_follows_updates(sampler):
    assert sampler._llm.options == {
        "model": "folder",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",  # others would bias TRL's correction
        "worker_extension_cls": "extension",
    }


def test_it_applies_updates_up_to_the_version_and_no_further(sampler):
    log = SimpleNamespace(read_since=lambda version: (SimpleNamespace(version=new) for new in range(version + 1, 9)))
    sampler.catch_up(log, 2)
    assert (sampler.version, sampler._client.pushed) == (2, [])
    sampler.catch_up(log, 5)
    assert (sampler.version, sampler._client.pushed) == (5, [3, 4, 5])


def test_samples_come_in_the_order_of_the_groups_with_their_own_seeds(sampler):
    drawn = sampler.draw([Group((4, 5), 2, seed=11), Group((6,), 1, seed=12)])
    assert drawn == [([4, 5, 11, 0], [-0.5, 0]), ([4, 5, 11, 1], [-0.5, -1]), ([6, 12, 0], [-0.5, 0])]
    parameters = sampler._parameters(Group((4,), 3, seed=11))
    assert vars(parameters) == {"n": 3, "seed": 11, "max_tokens": 5, "min_p": 0.0, "stop_token_ids": [1, 2], "logprobs": 0,
                                "temperature": 0.7, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.0}  # fmt: skip
