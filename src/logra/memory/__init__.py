"""Memory by category: a live ledger, and the tables made of it."""

from logra.memory.ledger import Ledger
from logra.memory.profile import profile
from logra.memory.timeline import Report

__all__ = ["Ledger", "Report", "profile"]
