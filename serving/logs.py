"""Logging of every process of ours: one format, one level."""

from __future__ import annotations

import logging


def configure_logging(level: str) -> None:
    """Set the level of the `ferry` loggers, and give them a handler once."""
    logger = logging.getLogger("ferry")
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
