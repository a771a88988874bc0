"""What to train on: built-in sums and products, any reasoning-gym dataset, or a Python file of the user's."""

from logra.rl.tasks.task import Row, Task, load_task

__all__ = ["Row", "Task", "load_task"]
