"""Commands and request fields that are not built yet, and the feature each belongs to."""

from __future__ import annotations

from engine.options.decoding import LORA, STRUCTURED
from engine.options.parallel import TENSOR

COMMANDS = {
    "blade_llm_split": TENSOR,
    "blade_llm_check": "the deployment check",
}

REQUEST_FIELDS = {
    "guided_json": STRUCTURED,
    "guided_regex": STRUCTURED,
    "model": f"{LORA} adapters by name (served names work)",
}
