"""The errors a user can meet. Each message names the field, its value, what is allowed and what to do next."""


class LograError(ValueError):
    """Base class of every error that `logra` raises for bad input or bad state."""


class ConfigError(LograError):
    """A setting has a value, or a combination of values, that is not allowed."""


class TargetError(LograError):
    """A module or parameter cannot be sketched: nothing matched, a tied weight, an unsupported type, a compiled model."""


class CaptureError(LograError):
    """A gradient was not captured, or reached a target weight past the capture."""


class PacketError(LograError):
    """A serialised update is damaged, of another format, or does not fit the weights it is applied to."""


class SyncError(LograError):
    """An update log, its server or a replica cannot do what was asked: a gap, another run, a full disk, lost weights."""


class CheckpointError(LograError):
    """A checkpoint is damaged, cannot be written, or belongs to another run."""


class ProbeError(LograError):
    """A probe is missing or unusable, or its forward tangent was lost."""


class DataError(LograError):
    """A dataset, a task file or a reward function returned something that training cannot use."""


class OtherProcessError(LograError):
    """Another process of the run met an error first; the message has it."""


class NonFiniteProbeError(ProbeError):
    """The probe met logits, a tangent or a KL that is NaN or infinite: the step should be skipped and counted."""
