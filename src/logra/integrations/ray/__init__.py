"""A fleet of rollout workers as Ray actors, each a replica that follows the log of updates.

    trainer --- groups to sample, and the version to sample them with ---> workers
       |                                                                      |
       +--- publishes updates ---> log of updates <--- catches up from it ----+

Ray places the workers and starts one that died again; it then loads the base model, catches up from the log and serves.
Every sample carries the version of the policy that drew it, and one of another version is refused and drawn again. A
group of samples is drawn from a seed of its own: samples depend neither on the number of workers nor on which one died.

`fleet` deals groups to workers and knows nothing of Ray, `pool` has the Ray actors, `worker` is what runs in them,
`trl_generation` puts a fleet into the place of TRL's engine. docs/distributed.md says how to run it, and what it trusts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logra.integrations.ray.fleet import Fleet
    from logra.integrations.ray.messages import Group, Sample
    from logra.integrations.ray.pool import RayPool

__all__ = ["Fleet", "Group", "RayPool", "Sample"]

_HOMES = {"Fleet": "fleet", "Group": "messages", "RayPool": "pool", "Sample": "messages"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
