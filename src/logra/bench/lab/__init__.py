"""A small RL loop in which every direction takes steps of the same realised KL, and each step's worth is measured."""
