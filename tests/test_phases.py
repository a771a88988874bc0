"""Marks of phases and purposes."""

from contextlib import suppress

import pytest

from logra import phases


def test_the_innermost_mark_counts_and_ends_with_its_block():
    assert phases.current_phase() is None
    with phases.phase("update"), phases.purpose("sync"):
        with suppress(KeyError), phases.phase("probe"), phases.purpose("projections"):
            assert (phases.current_phase(), phases.current_purpose()) == ("probe", "projections")
            raise KeyError
        assert (phases.current_phase(), phases.current_purpose()) == ("update", "sync")
    assert (phases.current_phase(), phases.current_purpose()) == (None, None)


def test_listeners_hear_of_a_change_while_the_old_phase_still_holds():
    """Fails if owners are looked up after the mark: a gradient dropped in between would be missed."""
    heard = []
    with phases.listening(lambda: heard.append(phases.current_phase())), phases.phase("recover"):
        pass
    with phases.phase("sync"):
        pass
    assert heard == [None, "recover"]


def test_an_unknown_phase_is_a_mistake_in_the_code():
    with pytest.raises(AssertionError, match="warmup"), phases.phase("warmup"):
        pass
