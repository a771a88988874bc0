"""Parts of the soak: a small policy, its task, the faults, and what is measured."""
