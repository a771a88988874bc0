"""A task of your own for the command line: prompts, and a reward for every completion.

    logra train --output-dir runs/questions --task examples/custom_task.py

`dataset()` returns rows with a "prompt" (text, or a list of chat messages) and any further columns; they are passed to
`reward` as lists. Or leave `dataset()` out and give --dataset prompts.jsonl. The reward is one number per completion,
or None for a completion that cannot be judged.
"""

COLOURS = ["red", "green", "blue", "yellow", "black", "white", "pink", "brown"]
THINGS = ["grass", "snow", "coal", "the sky", "a lemon", "blood", "chocolate", "a flamingo"]


def dataset():
    return [
        {"prompt": [{"role": "user", "content": f"What is the colour of {thing}{ending}"}], "thing": thing}
        for thing in THINGS
        for ending in ("?", "? Name one colour.")
    ]


def reward(completions, thing, **kwargs):
    """1 for naming exactly one colour, less 0.1 for each further word."""
    return [score(completion[0]["content"]) for completion in completions]


def score(text):
    words = text.lower().replace(".", " ").replace(",", " ").split()
    named = [word for word in words if word in COLOURS]
    return max(1.0 - 0.1 * (len(words) - 1), 0.0) if len(named) == 1 else 0.0
