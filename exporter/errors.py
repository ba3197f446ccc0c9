"""The two ways a command ends badly: bad input (exit code 2) and a failed check (exit code 1)."""

from __future__ import annotations


class InputError(Exception):
    """What the user gave cannot be used. One line: what arrived, what was expected, what to do. Exit code 2."""


class CheckError(Exception):
    """A check ran and failed. One line. Exit code 1."""
