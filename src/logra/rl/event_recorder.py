"""Writes what guards notice to the run folder, and shows it."""

from logra.rl.display import Display
from logra.rl.guards.events import Event
from logra.rl.run_folder import RunFolder

QUIET_STEPS = 50
"""A warning that repeats is shown again after so many steps; the file has every one."""
_NOTES = ("warn", "drop")
"""Actions that leave a run as it is, and may come with every step."""


class EventRecorder:
    """Subscriber of `Guards`.

    Args:
        folder: of the run.
        display: of the run.
    """

    def __init__(self, folder: RunFolder, display: Display) -> None:
        self._folder = folder
        self._display = display
        self._shown: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        """Record one event."""
        self._folder.add_event(event.to_dict())
        last = self._shown.get(event.kind)
        if event.action in _NOTES and last is not None and event.step - last < QUIET_STEPS:
            return
        self._shown[event.kind] = event.step
        self._display.say(f"Guard, {event}")
