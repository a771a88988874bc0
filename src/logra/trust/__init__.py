"""Trust region: predicts how far an update would move the policy and scales it to a KL budget, before it is written."""

from logra.trust.probe import Probe
from logra.trust.region import TrustRegion, update_mismatch

__all__ = ["Probe", "TrustRegion", "update_mismatch"]
