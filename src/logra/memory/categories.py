"""The categories that every byte of a training process belongs to, and which of them a method changes."""

CATEGORIES = {
    "weights": "weights of the targets (hi and lo planes, compute copies)",
    "non_target_parameters": "other parameters and buffers, adapters",
    "gradients": "dense gradients",
    "sketches": "gradient sketches",
    "projections": "projections, regenerated and dropped",
    "recovery_scratch": "scratch of recovery and step",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "logits": "logits and their softmax",
    "rollout": "rollout payload (KV cache, tokens, log-probs)",
    "sync": "synchronisation buffers",
    "reference_model": "reference model",
    "other": "other",
}
"""Names as in JSON, and what they hold."""

CHANGED = frozenset({"gradients", "sketches", "projections", "recovery_scratch", "optimizer_state"})
"""The rows that differ from dense AdamW by design of sketched training. All others stay what they were."""

OTHER_SHARE = 0.03
"""Above this share of the peak, "other" is a defect of the ledger."""

SHAPE_CALCULATION = (
    "One matrix: the gradient of a 4,096 x 4,096 weight has 16.8 M entries, its sketch at rank 256 has "
    "4,096 x 256 = 1.05 M. That ratio of 16 concerns those two arrays alone, not the process."
)
"""The example that is easily mistaken for the saving of a whole process."""
