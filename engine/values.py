"""Values that people give: whether they are numbers, and how wrong ones are shown back in an error."""

from __future__ import annotations

import sys
from typing import Any

SHOWN = 60  # characters

_LARGEST = sys.float_info.max


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite float, or an integer that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def shown(value: Any) -> str:
    """On one line and not long, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python does not write integers of thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
