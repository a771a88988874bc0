"""Running a prompt once for its group: the same numbers as running it for every completion."""

import pytest
import torch
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

import logra
from logra.errors import ConfigError
from logra.rl.grpo import CheckedGRPOTrainer
from logra.rl.logprobs import completion_log_probs
from logra.rl.shared_prompts import (
    can_share_prompts,
    continues_prefill,
    distinct_rows,
    fill_cache,
    order_by_prompt,
    shared_prefill,
)


@pytest.fixture
def sequences(tokenizer):
    """6 sequences of 3 distinct prompts of different length: ids, mask [6, 9], of which 4 completion tokens."""
    torch.manual_seed(3)
    prompts = torch.randint(2, len(tokenizer), (3, 5))
    lengths = torch.tensor([5, 2, 4])
    prompt_mask = (torch.arange(5) >= 5 - lengths[:, None]).long()
    prompts = prompts.masked_fill(prompt_mask == 0, tokenizer.pad_token_id)
    rows = torch.tensor([0, 1, 0, 2, 1, 0])
    completions = torch.randint(2, len(tokenizer), (6, 4))
    completion_mask = torch.ones_like(completions)
    completion_mask[2, 2:] = 0
    return torch.cat([prompts[rows], completions], dim=1), torch.cat([prompt_mask[rows], completion_mask], dim=1)


def test_distinct_rows():
    ids = torch.tensor([[5, 6], [1, 6], [5, 6], [1, 6]])
    mask = torch.tensor([[1, 1], [0, 1], [1, 1], [1, 1]])
    first, kind = distinct_rows(ids, mask)
    # The fourth row has the ids of the second, but its first token is not padding.
    assert sorted(first.tolist()) == [0, 1, 3]
    assert torch.equal(ids[first][kind], ids)
    assert torch.equal(mask[first][kind], mask)


def test_log_probabilities_and_gradients_are_the_same(make_model, sequences):
    ids, mask = sequences
    weights = torch.linspace(-1, 1, 24).view(6, 4)
    results = []
    for share in (False, True):
        model = make_model()
        log_probs, entropy = completion_log_probs(
            model, ids, mask, num_completion_tokens=4, temperature=0.8, with_entropy=True, share_prompts=share
        )
        (log_probs * weights).sum().backward()
        results.append((log_probs, entropy, {name: p.grad for name, p in model.named_parameters()}))
    (plain, plain_entropy, plain_grads), (shared, shared_entropy, shared_grads) = results
    # Two orders of summation in fp32. A gradient that does not flow back into the prompt would be off by far more.
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=0)
    torch.testing.assert_close(shared_entropy, plain_entropy, atol=1e-5, rtol=0)
    for name, grad in plain_grads.items():
        torch.testing.assert_close(shared_grads[name], grad, atol=1e-5, rtol=1e-4)


def test_sketches_are_the_same(make_model, sequences):
    # The targets run twice per forward, on the prompts and on the completions; both must be sketched.
    ids, mask = sequences
    norms = []
    for share in (False, True):
        model = make_model()
        optimizer = logra.SketchOptimizer(model, rank=8)
        log_probs, _ = completion_log_probs(
            model, ids, mask, num_completion_tokens=4, temperature=1.0, share_prompts=share
        )
        log_probs.sum().backward()
        norms.append(optimizer.clip_grad_norm_(1e9).item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_greedy_generation_is_the_same(model, sequences, tokenizer):
    model.eval()
    ids, mask = sequences[0][:, :5], sequences[1][:, :5]
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    plain = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    lengths = []
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: (lengths.append(kwargs["input_ids"].shape), forward(*args, **kwargs))[
        1
    ]
    with shared_prefill(model):
        shared = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    # Catches positions that count the padding of the shorter prompts, and a prompt that is run again for every row.
    assert torch.equal(shared, plain)
    assert lengths[:2] == [(3, 4), (6, 1)]
    assert model.generate.__func__ is type(model).generate


def test_nothing_is_shared_where_no_prompts_are_equal(model):
    ids = torch.arange(2, 8).view(3, 2)
    assert fill_cache(model, ids, torch.ones_like(ids)) is None


def test_a_single_prompt_token_is_not_split(model):
    model.eval()
    ids, mask = torch.full((2, 1), 5), torch.ones(2, 1, dtype=torch.long)
    with shared_prefill(model):
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    assert output.shape[0] == 2
    ids, mask = torch.tensor([[5, 6], [5, 7]]), torch.ones(2, 2, dtype=torch.long)
    log_probs, _ = completion_log_probs(model, ids, mask, num_completion_tokens=1, temperature=1.0, share_prompts=True)
    assert log_probs.shape == (2, 1)


def test_sliding_windows_are_left_alone(model):
    assert can_share_prompts(model)
    config = MistralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    assert not can_share_prompts(MistralForCausalLM(config))


def test_micro_batches_are_dealt_by_prompt():
    def batch(prompts, first):
        rows = torch.arange(first, first + len(prompts))
        return {
            "prompt_ids": torch.tensor(prompts)[:, None],
            "prompt_mask": torch.ones(len(prompts), 1),
            "completion_ids": rows[:, None],
            "advantages": rows.float(),
            "num_items_in_batch": torch.tensor(7),
        }

    ordered = order_by_prompt([batch([5, 6], 0), batch([6, 5], 2)])
    assert [b["prompt_ids"].flatten().tolist() for b in ordered] == [[5, 5], [6, 6]]
    # Rows stay whole, and what is not a row stays as it is.
    assert [b["advantages"].tolist() for b in ordered] == [[0.0, 3.0], [1.0, 2.0]]
    assert [b["completion_ids"].flatten().tolist() for b in ordered] == [[0, 3], [1, 2]]
    assert [b["num_items_in_batch"].item() for b in ordered] == [7, 7]
    with_images = [{"prompt_ids": torch.ones(1, 1), "num_images": [1]}]
    assert order_by_prompt(with_images) == with_images


@pytest.mark.parametrize("steps_per_generation", [2, 4])
def test_training_is_the_same_with_and_without(
    make_model, tokenizer, dataset, make_args, num_letters, steps_per_generation, monkeypatch
):
    def train(share):
        model = make_model()
        trainer = CheckedGRPOTrainer(
            model=model,
            reward_funcs=num_letters,
            args=make_args(max_steps=2, learning_rate=1e-2, optim="sgd", steps_per_generation=steps_per_generation),
            train_dataset=dataset,
            processing_class=tokenizer,
        )
        assert trainer._shares_prompts
        trainer.__dict__["_can_share_prompts"] = share
        trainer.train()
        return model

    plain, shared = train(False), train(True)
    for name, value in plain.named_parameters():
        # Catches rows that are lost or counted twice when the micro-batches are dealt again.
        torch.testing.assert_close(shared.get_parameter(name), value, atol=1e-5, rtol=1e-4)


def test_checkpointing_switched_on_by_the_user_ends_the_sharing(
    make_model, tokenizer, dataset, make_args, num_letters, sequences
):
    """Fails if only TRL's argument is asked: the model drops the cache, and completions are scored without prompt."""
    model = make_model().train()
    trainer = CheckedGRPOTrainer(
        model=model,
        reward_funcs=num_letters,
        args=make_args(),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    assert trainer._shares_prompts
    ids, mask = sequences
    plain, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 4)
    model.gradient_checkpointing_enable()
    assert not trainer._shares_prompts
    recomputed, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 4)
    torch.testing.assert_close(recomputed, plain, atol=1e-5, rtol=0)  # two orders of summation in fp32
    with pytest.raises(ConfigError, match="0 of 5 prompt tokens"):
        fill_cache(model, ids[:, :5], mask[:, :5])


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False},
        {"num_beams": 2},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
    ],
)
def test_only_plain_sampling_continues_a_prefill(settings):
    """Fails if a generation without cache, which would lose the prompt, or with one of its own is handed a cache."""
    plain = GenerationConfig(do_sample=True, use_cache=True, num_beams=1)
    assert continues_prefill(plain, GenerationConfig())
    assert not continues_prefill(plain, GenerationConfig(**settings))
    assert not continues_prefill(GenerationConfig(**settings), plain)


@pytest.mark.parametrize("settings", [{"use_cache": False}, {"num_beams": 2}, {"cache_implementation": "static"}])
def test_other_generations_run_as_in_trl(model, tokenizer, dataset, make_args, num_letters, settings, monkeypatch):
    trainer = CheckedGRPOTrainer(
        model=model,
        reward_funcs=num_letters,
        args=make_args(generation_kwargs=settings),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    handed_over = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **options: (handed_over.append(options), generate(**options))[1])
    trainer._generate_single_turn([[5, 6, 7]] * 4, None, {}, num_generations=4)
    assert [("cache" in options) for options in handed_over] == [False]
