"""Every tunable of rescheduling: the keys of `llumnix_config`, flat.

Thresholds on freeness are shares of an engine's capacity, so that they mean the same on an engine of any size. The
paper gives them in blocks per request on engines of 851 blocks; `3 / 851` below is its "3". In decode steps the share
s is s x capacity in tokens: 3 / 851 x 13,616 = 48 steps.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.options.option import ConfigError, Kind, Option
from engine.values import shown

PAPER_BLOCKS = 851  # KV blocks of the paper's engines (LLaMA-7B on an A10), 16 tokens each

DISPATCH_POLICIES = (
    *("llumnix", "priority_blind", "infaas", "round_robin", "least_requests", "lmetric", "sticky_prefix"),
)
REQUEST_POLICIES = ("SR", "LR", "LCR", "FCW", "FCWSR")


def setting(kind: Kind, default: Any, help: str, **rest: Any) -> Any:
    """A dataclass field with its declaration; `declared` fills in the name."""
    return dataclasses.field(default=default, metadata={"option": Option("", kind, default, help, **rest)})


@dataclass(frozen=True, kw_only=True)
class LlumnixSettings:
    """Values. Construction checks types, ranges and combinations; raises ConfigError, one line."""

    # Dispatch
    dispatch_policy: str = setting("str", "llumnix", "where a new request goes", choices=DISPATCH_POLICIES)
    high_headroom: bool = setting(
        "bool", True, "engines that run a request of the high class (priority below 0) keep the rest of them away"
    )
    high_target_share: float = setting(
        "float",
        1600 / (PAPER_BLOCKS * 16),
        "share of an engine's KV below which decoding is at its fastest: what the high class leaves to be used",
        low=0.0,
        high=1.0,
    )

    # Which engines exchange requests
    enable_moves: bool = setting("bool", True, "false: requests move only away from engines that drain")
    pairing_interval_s: float = setting("float", 0.2, "seconds between rounds of pairing", low=0.01, high=60.0)
    migrate_out_share: float = setting(
        "float", 3 / PAPER_BLOCKS, "engines with a lower freeness give requests away", low=0.0, high=1.0
    )
    migrate_in_share: float = setting(
        "float", 6 / PAPER_BLOCKS, "engines take requests while their freeness stays higher", low=0.0, high=1.0
    )
    max_moves_per_engine: int = setting("int", 1, "moves at a time to or from one engine", low=1, high=64)
    max_moves_draining: int = setting(
        "int", 4, "moves at a time from an engine that drains, and to one that takes from it", low=1, high=64
    )
    max_moves: int = setting("int", 128, "moves at a time in the whole cluster", low=1, high=65536)

    # Which request moves, and how
    request_policy: str = setting(
        "str",
        "FCWSR",
        "SR shortest running, LR longest running, LCR last come running, FCW first come waiting, FCWSR FCW, then SR",
        choices=REQUEST_POLICIES,
    )
    move_cooldown_s: float = setting(
        "float", 2.0, "a request stays this long after a move, unless its engine drains", low=0.0, high=3600.0
    )
    movable_reported: int = setting("int", 8, "movable requests that a load report lists", low=1, high=64)
    bandwidth_mb_per_s: float = setting(
        "float", 0.0, "most megabytes a second that one engine sends for moves; 0: no limit", low=0.0
    )
    max_stages: int = setting(
        "int", 4, "copies of a move while the request decodes on, before it is held", low=1, high=64
    )
    last_stage_blocks: int = setting(
        "int", 2, "blocks left when the request is held for the last copy", low=1, high=1024
    )
    reservation_timeout_s: float = setting(
        "float", 10.0, "a destination frees promised blocks after this long without news", low=0.1, high=600.0
    )
    transfer_timeout_s: float = setting(
        "float", 10.0, "one transfer or call of a move may take this long", low=0.1, high=600.0
    )
    verify_moves: float = setting(
        "float", 0.01, "share of moved or resumed requests that are computed again and compared", low=0.0, high=1.0
    )

    # How many engines
    scale_low_share: float = setting(
        "float", 10 / PAPER_BLOCKS, "average freeness below which a replica is added", low=0.0, high=1.0
    )
    scale_high_share: float = setting(
        "float", 60 / PAPER_BLOCKS, "average freeness above which a replica is taken away", low=0.0, high=1.0
    )
    scale_interval_s: float = setting("float", 10.0, "seconds between decisions on scaling", low=0.1, high=3600.0)
    scale_up_after_s: float = setting(
        "float", 0.0, "the average must be below the band this long", low=0.0, high=86400.0
    )
    scale_down_after_s: float = setting(
        "float", 10.0, "the average must be above the band this long", low=0.0, high=86400.0
    )
    scale_to_zero_after_s: float = setting(
        "float", 300.0, "the last replica goes after this long without a request, if min_replicas is 0", low=1.0,
        high=86400.0,
    )  # fmt: skip
    pd_ratio: str = setting("str", "none", "prefill : decode replicas, such as 1:3; none: every replica does both")

    def __post_init__(self) -> None:
        coerce(self, "llumnix_config")
        if self.migrate_in_share < self.migrate_out_share:
            raise ConfigError(
                f"--llumnix_config.migrate_in_share is {self.migrate_in_share:g}, must be at least migrate_out_share "
                f"({self.migrate_out_share:g})"
            )
        if self.scale_high_share <= self.scale_low_share:
            raise ConfigError(
                f"--llumnix_config.scale_high_share is {self.scale_high_share:g}, must be greater than "
                f"scale_low_share ({self.scale_low_share:g})"
            )
        if parse_ratio(self.pd_ratio) is not None and not self.enable_moves:
            raise ConfigError(
                f"--llumnix_config.pd_ratio is {self.pd_ratio!r}, must be none while requests do not move "
                "(enable_llumnix, llumnix_config.enable_moves)"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LlumnixSettings:
        """Settings from a parsed file. Raises ConfigError for unknown keys, wrong types and values out of range."""
        return strict(cls, values, "llumnix_config")

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> LlumnixSettings:
        """Settings another process checked, see `tolerant`."""
        return tolerant(cls, message)

    def to_message(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def out_steps(self, capacity: int) -> float:
        """Freeness in decode steps below which an engine of `capacity` tokens gives requests away."""
        return self.migrate_out_share * capacity

    def in_steps(self, capacity: int) -> float:
        """Freeness in decode steps above which an engine of `capacity` tokens must stay when it takes a request."""
        return self.migrate_in_share * capacity


def parse_ratio(text: str) -> tuple[int, int] | None:
    """(prefill, decode) of "1:3"; None for "none". Raises ConfigError."""
    if text == "none":
        return None
    parts = text.split(":")
    if len(parts) != 2 or not all(re.fullmatch(r"\s*0*[1-9][0-9]{0,5}\s*", part) for part in parts):
        raise ConfigError(
            f"--llumnix_config.pd_ratio is {shown(text)}, must be none or two positive integers, in quotes in YAML: "
            '"1:3"'
        )
    return int(parts[0]), int(parts[1])


T = TypeVar("T")

logger = logging.getLogger("ferry.settings")
_warned: set[str] = set()

_declared: dict[Any, dict[str, Option]] = {}


def declared(kind: Any) -> dict[str, Option]:
    """The declarations of a dataclass made of `setting`s, by name; documentation is made from them."""
    if kind not in _declared:
        fields = dataclasses.fields(kind)
        _declared[kind] = {f.name: dataclasses.replace(f.metadata["option"], name=f.name) for f in fields}
    return _declared[kind]


def options() -> dict[str, Option]:
    """The declaration of every setting by its name."""
    return declared(LlumnixSettings)


def coerce(values: Any, where: str) -> None:
    """Check the fields of a new object made of `setting`s and give them their types. Raises ConfigError."""
    for name, option in declared(type(values)).items():
        object.__setattr__(values, name, option.coerce(getattr(values, name), f"{where}.{name}"))


def strict(kind: type[T], values: Any, where: str) -> T:
    """An object made of `setting`s from a parsed file: unknown keys are a ConfigError that names the nearest."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} holds {type(values).__name__}, must be a mapping of settings")
    for key in values:
        if key not in declared(kind):
            near = difflib.get_close_matches(str(key), declared(kind), 1, 0.0)
            raise ConfigError(f"{where} has no setting {key!r}, the nearest is {near[0]}")
    return kind(**values)


def tolerant(kind: type[T], message: Mapping[str, Any]) -> T:
    """An object made of `setting`s that another process checked, perhaps of a newer version. Keys unknown here are
    ignored, values unknown here give way to the default, with a warning once: a process that stopped taking commands
    because of one of them could not even drain."""
    values = {}
    for name, option in declared(kind).items():
        if name in message:
            try:
                values[name] = option.coerce(message[name], name)
            except ConfigError as error:
                _warn(f"a setting of another version gives way to its default: {error}")
    try:
        return kind(**values)
    except ConfigError as error:  # they do not go together here
        _warn(f"settings of another version give way to the defaults: {error}")
        return kind()


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)


DEFAULTS = LlumnixSettings()
