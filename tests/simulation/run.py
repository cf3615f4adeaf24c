"""One run: everything in it follows from its seed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

from ray.exceptions import RayError

from engine.sampling.params import SamplingParams
from tests.fakes import VOCAB
from tests.simulation.cluster import MANAGER, MAX_LENGTH, Cluster, Shape
from tests.simulation.faults import POINTS, READ, SELDOM, SHAPED, Faults
from tests.simulation.loop import Hung, run_virtually
from tests.simulation.network import Handle, Weather
from tests.simulation.users import User

FAULTS_A_RUN = 10
CALM = 10  # every so many seeds nothing goes wrong
MECHANISMS = ("live", "live", "live", "stop_and_copy", "recompute", "requeue")
COPYING = ("live", "stop_and_copy")
DEALT = (*POINTS, *SELDOM)  # what seldom comes about is tried more often
REST_S = 150.0  # after the last request: how long until the cluster is as if nothing had been
USERS = 30


@dataclass
class Outcome:
    seed: int
    violations: list[str]
    hits: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # of requests
    moves: Counter[str] = field(default_factory=Counter)  # outcomes
    virtual_s: float = 0.0
    callbacks: int = 0
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*self.violations, f"again, with a trace: python -m tests.simulation --replay {self.seed}"])


def run(seed: int, trace: bool = False, points: list[str] | None = None) -> Outcome:
    """Run a random cluster with random requests, moves and faults. Never raises for what goes wrong in it."""
    return Run(seed, trace, points).outcome()


def points_of(seed: int) -> list[str]:
    """The faults of a run: over many seeds every point has its turn equally often. Some runs have none."""
    if seed % CALM == 0:
        return []
    dealt = range(seed * FAULTS_A_RUN, (seed + 1) * FAULTS_A_RUN)
    points = [_deck(i // len(DEALT))[i % len(DEALT)] for i in dealt]
    return sorted(points, key=lambda point: point == "manager_away_30s")  # nobody moves anything then


@cache
def _deck(number: int) -> list[str]:
    return Random(number).sample(DEALT, len(DEALT))


class Run:
    """`points`: faults other than those of the seed. Without any nothing is lost or repeated either."""

    def __init__(self, seed: int, trace: bool = False, points: list[str] | None = None):
        self.seed = seed
        self.random = Random(f"run {seed}")
        self.points = points_of(seed) if points is None else points
        self.trace: list[str] | None = [] if trace else None
        self.cluster = Cluster(self._shape(), Random(f"cluster {seed}"), self.trace)
        timed = [point for point in self.points if point not in SHAPED]
        self.faults = Faults(self.cluster, Random(f"faults {seed}"), timed)
        self._heads = [self._tokens(self.random.randrange(8, 40)) for _ in range(3)]
        self._users = 0

    def outcome(self) -> Outcome:
        cluster = self.cluster
        with cluster.logs():
            try:
                run_virtually(self._main, cluster.loop)
            except Hung as error:
                cluster.violations.append(str(error))
                cluster.violations += list(cluster.unrest())[:20]
            except Exception as error:
                cluster.violations.append(f"the run itself failed: {type(error).__name__}: {error}")
                if self.trace is not None:
                    raise
        cluster.violations += cluster.loop.errors[:3]
        virtual_s, callbacks = cluster.loop.now, 3_000_000 - cluster.loop.callbacks_left
        cluster.loop.dispose(cluster.processes)
        self.faults.hits["newer_code"] += bool(cluster.newer & cluster.heard)
        outcome = Outcome(self.seed, cluster.violations, self.faults.hits, virtual_s=virtual_s, callbacks=callbacks)
        outcome.ends = Counter(user.end or "none" for user in cluster.users)
        outcome.moves = Counter(cluster.moved)
        outcome.trace = self.trace or []
        return outcome

    # -- what the seed makes ------------------------------------------------------------------------------------

    def _shape(self) -> Shape:
        random = self.random
        unequal = "unequal_compat_key" in self.points
        engines = random.choice((2, 2, 3, 4)) if not unequal else 4
        share = random.choice((0.1, 0.4, 0.6))
        newer = ("engine-1", "ingress-1", "manager-2") if "newer_code" in self.points else ()
        settings: dict[str, Any] = {
            "pairing_interval_s": random.choice((0.05, 0.2)),
            "migrate_out_share": share,
            "migrate_in_share": share,
            "move_cooldown_s": random.choice((0.0, 0.3)),
            "max_moves_per_engine": random.choice((1, 2, 4)),
            "request_policy": random.choice(("SR", "LR", "LCR", "FCW", "FCWSR")),
            "max_stages": random.choice((1, 2, 4)),
            "last_stage_blocks": random.choice((1, 2)),
            "transfer_timeout_s": random.choice((1.0, 2.0)),
            "enable_moves": random.random() < 0.8,
        }
        return Shape(
            engines=engines,
            ingresses=random.choice((1, 2, 3)),
            managers=1,
            blocks=random.choice((24, 40, 64)),
            host_blocks=random.choice((0, 0, 16)),
            seats=random.choice((3, 8)),
            step_s=random.choice((0.01, 0.03)),
            copy_s=random.choice((0.001, 0.02)),
            lease_s=random.choice((2.0, 4.0)),
            policy=random.choice(("fcfs", "priority")),
            compat_keys=("kv", "other") if unequal else ("kv",),
            newer=newer,
            settings=settings,
        )

    def _weather(self) -> Weather:
        random = self.random
        return Weather(
            typical_s=random.choice((0.001, 0.004)),
            spike=random.choice((0.0, 0.02, 0.1)),
            spike_s=random.choice((0.1, 0.6)) if self.points else 0.1,
            loss=random.choice((0.0, 0.0, 0.01)) if self.points else 0.0,
            repeat=random.choice((0.0, 0.02, 0.1)) if self.points else 0.0,
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def _user(self) -> User:
        random = self.random
        self._users += 1
        head = random.choice(self._heads)[: random.randrange(0, 40)] if random.random() < 0.5 else []
        prompt = head + self._tokens(random.randrange(1, 60))
        params = SamplingParams(
            temperature=random.choice((0.0, 0.8)),
            seed=random.choice((None, random.randrange(1000))),
            max_tokens=random.choice((random.randrange(1, 10), *[random.randrange(10, 60) for _ in range(4)], None)),
            stop_token_ids=(random.randrange(VOCAB),) if random.random() < 0.3 else (),
            logprobs=random.choice((None, 0, 2)),
        )
        priority = random.choice((0, 0, 0, 0, 1, -1))
        leave_after = random.randrange(1, 30) if random.random() < 0.1 else None
        return User(f"r{self._users}", prompt, params, priority, MAX_LENGTH, leave_after=leave_after)

    # -- the run ------------------------------------------------------------------------------------------------

    async def _main(self) -> None:
        cluster = self.cluster
        cluster.start()
        await asyncio.sleep(0.5)
        cluster.network.weather = self._weather()
        faults = asyncio.ensure_future(self.faults.run(0.3))
        moves = asyncio.ensure_future(self._moves())
        await self._load(faults)
        await self._until_ended()
        moves.cancel()
        cluster.network.weather = Weather()
        await self._until_rest()

    async def _load(self, faults: asyncio.Future[None]) -> None:
        """Requests keep coming while faults do."""
        random, cluster = self.random, self.cluster
        most = random.choice((3, 6, 10))
        while not cluster.violations and self._users < USERS:
            active = sum(user.active for user in cluster.users)
            names = [name for name in cluster.clients if not cluster.process(name).stopped]
            if active < most and names:
                cluster.use(self._user(), random.choice(names))
            if faults.done() and self._users >= (6 if self.points else 25):
                break
            await asyncio.sleep(random.uniform(0.0, 0.2) if active < most else 0.1)
        if not cluster.violations:
            await faults

    async def _until_ended(self) -> None:
        while any(user.active for user in self.cluster.users) and not self.cluster.violations:
            self.cluster.look(longest_s=60.0)
            await asyncio.sleep(0.25)

    async def _until_rest(self) -> None:
        """Everything is as if nothing had been, within the time that leases and reservations take."""
        cluster = self.cluster
        until = cluster.loop.now + REST_S
        while not cluster.violations and (left := next(cluster.unrest(), None)) is not None:
            if cluster.loop.now > until:
                cluster.violations += [f"{REST_S:g} s later: {what}" for what in cluster.unrest()]
                cluster.violate(left)
            await asyncio.sleep(0.5)
        for user in cluster.users:
            if user.end not in ("stop", "length", "left", "lost", "cancelled") and not user.excused:
                cluster.violate(f"{user.id} ended with {user.end!r} after {len(user.tokens)} tokens: {user.message}")
        if not self.points:
            self._check_calm()
        for failure in cluster.network.failures:
            if "InjectedFailure" not in failure and "not running any more" not in failure:
                cluster.violate(f"a call failed: {failure}")

    def _check_calm(self) -> None:
        """Moves alone, on a network that is fast enough, cost nobody anything: none is undone after its COMMIT, and no
        request is started again."""
        for name, client in self.cluster.clients.items():
            if client.tracker.resumed:
                self.cluster.violate(f"{name} has started {client.tracker.resumed} requests again")
        for manager in self.cluster.managers.values():
            for move in manager.rescheduler.moves:
                if move["outcome"] not in ("moved", "aborted"):
                    self.cluster.violate(f"a move came to nothing: {move}")

    async def _moves(self) -> None:
        """Somebody moves requests by hand all the time."""
        random = self.random
        while True:
            await asyncio.sleep(random.uniform(0.0, 0.25))
            nodes = {n: node for n, node in self.cluster.nodes.items() if node.state != "starting"}
            owned = [(request, n) for n, node in nodes.items() for request in node.engine.scheduler.requests]
            if not owned or len(nodes) < 2:
                continue
            request, source = random.choice(owned)
            destination = random.choice([n for n in nodes if n != source])
            options = {"mechanism": random.choice(MECHANISMS), "chunk_bytes": random.choice((64, 192, 1024))}
            if any(armed.method in ("write", READ) for armed in self.faults.armed):
                options = {"mechanism": random.choice(COPYING), "chunk_bytes": 64}
            if random.random() < 0.3:
                options["compression"] = "zlib"
            self.cluster.operator.spawn(self._move(request, destination, options))

    async def _move(self, request_id: str, destination: str, options: dict[str, Any]) -> None:
        try:
            result = await Handle(MANAGER).migrate.remote(request_id, destination, options)
        except RayError as error:
            self.cluster.moved[type(error).__name__] += 1
            return
        message = result.get("message", "moved")
        self.cluster.note("operator:", request_id, destination, message)
        self.cluster.moved[result.get("outcome", result.get("error"))] += 1
        for part, point in (("KV differs", "unequal_compat_key"), ("protocol version", "other_version_refused")):
            if part in message:
                self.faults.hits[point] += 1


def describe(outcomes: Iterator[Outcome]) -> str:
    """Totals of many runs."""
    hits, ends, moves = Counter[str](), Counter[str](), Counter[str]()
    for outcome in outcomes:
        hits += outcome.hits
        ends += outcome.ends
        moves += outcome.moves
    return f"requests {dict(ends)}\nmoves {dict(moves)}\nfaults {dict(sorted(hits.items()))}"
