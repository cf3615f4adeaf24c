"""Parameters that are known but wait for a feature: declared here, refused when set."""

from __future__ import annotations

from engine.options.decoding import DECODING
from engine.options.draft import DRAFT
from engine.options.models import MODELS
from engine.options.operations import OPERATIONS
from engine.options.option import ConfigError, Option
from engine.options.parallel import PARALLEL
from engine.options.quantization import QUANTIZATION
from engine.options.requests import REQUESTS

UNBUILT: tuple[Option, ...] = (*MODELS, *REQUESTS, *PARALLEL, *QUANTIZATION, *DECODING, *DRAFT, *OPERATIONS)

__all__ = ["UNBUILT", "ConfigError", "Option"]
