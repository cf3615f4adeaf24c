"""Named ways to run a cluster: this system, the same under other conditions, and baselines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.options.option import ConfigError
from llumnix.settings import LlumnixSettings

REPORT_S = 0.1  # the live engines' shortest time between two load reports

# How old the loads are that the paper's dispatcher acts on, both for Llumnix and for INFaaS++ there. Fitted: with it
# INFaaS++ has the paper's latencies; see docs/simulator.md.
PAPER_REPORT_S = 1.5


@dataclass(frozen=True)
class Policy:
    name: str
    settings: LlumnixSettings
    moves: bool  # false: no request ever moves
    classes: bool  # false: blind to priorities
    report_s: float  # between load reports
    booking: bool  # the dispatcher counts what it has just sent


def policy(name: str, settings: LlumnixSettings | None = None) -> Policy:
    """A policy by name; `settings` tune those that move requests. Raises ConfigError for an unknown name.

    llumnix          this system
    llumnix_base     the same, blind to priorities
    llumnix_paper    this system with as little knowledge as the paper's: loads PAPER_REPORT_S old, no bookings
    infaas           INFaaS++ with the loads of the paper
    infaas_informed  INFaaS++ with as much knowledge as this system
    any other        that dispatch policy, without moves
    """
    chosen = settings or LlumnixSettings()
    blind = replace(chosen, dispatch_policy="priority_blind", high_headroom=False)
    match name:
        case "llumnix":
            return Policy(name, chosen, True, True, REPORT_S, True)
        case "llumnix_base":
            return Policy(name, blind, True, False, REPORT_S, True)
        case "llumnix_paper":
            return Policy(name, blind, True, False, PAPER_REPORT_S, False)
        case "infaas":
            return Policy(name, replace(chosen, dispatch_policy="infaas"), False, False, PAPER_REPORT_S, False)
        case "infaas_informed":
            return Policy(name, replace(chosen, dispatch_policy="infaas"), False, False, REPORT_S, True)
        case "round_robin" | "least_requests" | "lmetric" | "sticky_prefix" | "priority_blind":
            return Policy(name, replace(chosen, dispatch_policy=name), False, False, REPORT_S, True)
    raise ConfigError(f"--policies has {name!r}, must be one of {', '.join(POLICIES)}")


POLICIES = (
    *("llumnix", "llumnix_base", "llumnix_paper", "infaas", "infaas_informed"),
    *("round_robin", "least_requests", "lmetric", "sticky_prefix", "priority_blind"),
)
