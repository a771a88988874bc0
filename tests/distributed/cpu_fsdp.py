"""FSDP2 through accelerate on CPU processes, for tests."""

import functools

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def allow_fsdp_on_cpus():
    """accelerate reads its FSDP settings for every kind of device but this one, on which FSDP2 itself runs."""
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init
