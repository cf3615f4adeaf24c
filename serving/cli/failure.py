"""The one sentence that matters in Serve's long message about a failed start."""

from __future__ import annotations

import re

COLOR = re.compile(r"\x1b\[[0-9;]*m")
NAME = r"(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Arguments|Timeout)"
RAISED = re.compile(rf"^{NAME}(?:\(\w+\))?: (.+)$")
HINT = "See controller logs for details"


def cause_sentence(message: str) -> str:
    """The text of the last exception in a traceback, or the first line when there is none."""
    lines = [line.strip() for line in COLOR.sub("", message).splitlines()]
    causes = [match.group(1) for line in lines if (match := RAISED.match(line))]
    if causes:
        return causes[-1]
    plain = [line for line in lines if line]
    return plain[0].split(HINT)[0].strip() if plain else "the service did not start; see Ray's logs"
