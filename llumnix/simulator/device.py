"""What an engine costs on a device: constants of a small model of step and transfer times, one file a device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.options.option import ConfigError

DIRECTORY = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class Device:
    """Times in seconds, lengths in tokens. A decode step of a batch of B requests that hold T tokens together takes

        step_base_s + step_request_s x B + step_token_s x T

    and a prompt of n tokens, or what it adds to a step, takes

        prompt_token_s x n + prompt_token2_s x n^2
    """

    name: str
    block_size: int
    total_blocks: int
    block_bytes: int
    step_base_s: float
    step_request_s: float
    step_token_s: float
    prompt_base_s: float  # of a step that has prompts only
    prompt_token_s: float
    prompt_token2_s: float
    chunked_prefill: bool  # prompts share steps with decoding, in chunks; false: they have steps of their own
    max_num_batched_tokens: int
    max_num_seqs: int
    watermark_share: float  # of the blocks, kept free when a request is admitted beside others
    bandwidth_bytes_per_s: float  # of a move's transfer
    call_s: float  # one round trip between engines
    move_slowdown: float  # share by which steps are longer while an engine takes part in a move
    startup_s: float  # from the decision to add a replica until it is ready

    @property
    def capacity(self) -> int:
        """Tokens in the KV cache."""
        return self.total_blocks * self.block_size

    def step_s(self, batch: int, tokens: float) -> float:
        return self.step_base_s + self.step_request_s * batch + self.step_token_s * tokens

    def prompt_s(self, tokens: float) -> float:
        return self.prompt_token_s * tokens + self.prompt_token2_s * tokens * tokens


def load_device(name: str) -> Device:
    """A device of this package by its name, or any file by its path. Raises ConfigError, one line."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else DIRECTORY / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in DIRECTORY.glob("*.yaml")))
        raise ConfigError(f"--device is {name!r}, must be one of {known} or the path of a YAML file")
    return _parse(path.stem, yaml.safe_load(path.read_text()), str(path))


def _parse(name: str, values: Any, path: str) -> Device:
    fields: dict[str, str] = {
        field.name: str(field.type) for field in dataclasses.fields(Device) if field.name != "name"
    }
    if not isinstance(values, dict) or set(values) != set(fields):
        given = set(values) if isinstance(values, dict) else set()
        wrong = sorted(set(map(str, given)) ^ set(fields))
        raise ConfigError(f"{path}: missing or unknown constants: {', '.join(wrong)}")
    for key, value in values.items():
        if fields[key] == "bool":
            right = isinstance(value, bool)
        else:
            right = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
            right = right and (fields[key] != "int" or isinstance(value, int))
        if not right:
            raise ConfigError(f"{path}: {key} is {value!r}, must be of type {fields[key]} and not negative")
    return Device(name=name, **values)
