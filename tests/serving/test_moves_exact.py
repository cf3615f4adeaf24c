"""Requests of every class move between running nodes: tokens and logprobs are those of an undisturbed run, bit for bit.

Real models in bfloat16 on the native kernels, the whole path of a move: staged copies, commit, the ingress's tracker.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.request import Epoch, Request, Status
from engine.sampling.params import SamplingParams
from engine.step import StepPlan, StepResult, TokenLogprobs
from llumnix.load import DRAINING, READY
from llumnix.migration import Mechanism
from serving.engine_node import EngineNode
from serving.move_source import MoveOptions
from tests.exact import Answer, Job, Loaded, alone, load, make_engine, promised, run
from tests.serving.nodes import Handle, Nodes, until

pytestmark = pytest.mark.skipif(not promised(), reason="bits are promised for the native kernels only")

STEP_S = 0.002  # beside the computation, so that moves have their time
OTHER = {"a": "b", "b": "a"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load("llama", tmp_path_factory.mktemp("llama"))


def builder(loaded: Loaded, step_s: float = STEP_S, **options: Any) -> Callable[[], Engine]:
    def build() -> Engine:
        torch.set_num_threads(1)
        engine = make_engine(loaded, **options)
        execute = engine.executor.execute

        def slowly(plan: StepPlan) -> StepResult:
            if engine.scheduler.requests:  # else it is verifying
                time.sleep(step_s)
            return execute(plan)

        engine.executor.execute = slowly  # type: ignore[method-assign]
        return engine

    return build


@dataclass
class Adoption:
    """A request as it arrived somewhere."""

    id: str
    output: int
    computed: int
    reserved: bool


def adoptions(node: EngineNode) -> list[Adoption]:
    """What a node will adopt."""
    seen: list[Adoption] = []
    adopt = node.engine.scheduler.adopt

    def watched(record: Request, epoch: Epoch, computed: int, key: str | None = None) -> Request:
        seen.append(Adoption(record.id, len(record.output), computed, key is not None))
        return adopt(record, epoch, computed, key)

    node.engine.scheduler.adopt = watched  # type: ignore[method-assign]
    return seen


async def stream(nodes: Nodes, name: str, job: Job) -> tuple[Answer, str]:
    """What a client gets: (tokens with logprobs, finish reason)."""
    answer: Answer = []
    finish = ""
    async with aclosing(nodes.client.generate(name, job.prompt, job.params.to_dict())) as outputs:
        async for several in outputs:
            for output in several:
                assert "error" not in output, output
                found = output.get("logprobs")
                logprobs = None if found is None else TokenLogprobs(*found[:2], [(t, p) for t, p in found[2]])
                answer.append((output["token"], logprobs))
                finish = output.get("finish", finish)
    return answer, finish


async def move(nodes: Nodes, name: str, options: MoveOptions) -> dict[str, Any]:
    """To the other node."""
    source = await nodes.owner(name)
    destination = OTHER[source]
    result = await nodes[source].giving.move(name, destination, Handle(nodes[destination]), options)
    await nodes[source].thread.call(lambda: None)  # the source has let go of it
    return result


def staged(nodes: Nodes, blocks: int = 2, mechanism: Mechanism = Mechanism.LIVE) -> MoveOptions:
    """A few blocks at a time."""
    return MoveOptions(mechanism=mechanism, chunk_bytes=blocks * nodes["a"].block_bytes, transfer_timeout_s=30.0)


async def only(nodes: Nodes, name: str) -> None:
    """New requests go to this node, until the other one is READY again."""
    other = OTHER[name]
    nodes[other].state = DRAINING
    await until(lambda: nodes.client.links[other].report.state == DRAINING)


async def at_rest(nodes: Nodes) -> None:
    """Nothing is left anywhere, and what was verified agrees."""
    await until(lambda: not any(node.engine.scheduler.requests for node in nodes.nodes.values()))
    await until(lambda: not any(node.engine.verifier.has_work for node in nodes.nodes.values()), 60.0)
    for node in nodes.nodes.values():
        await node.thread.call(node.engine.scheduler.check)
        stats = await node.thread.call(node.engine.stats)
        assert stats.free_blocks == stats.total_blocks and not stats.verify_mismatches
    assert nodes.client.tracker.resumed == 0


def verify_all(nodes: Nodes, share: float = 1.0) -> None:
    for node in nodes.nodes.values():
        node.settings = replace(node.settings, verify_moves=share)


def verified(nodes: Nodes) -> int:
    return sum(node.engine.verifier.verified for node in nodes.nodes.values())


def prompt_of(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 250) for _ in range(length)]


SEEDED: dict[str, Any] = {"temperature": 1.1, "seed": 7}
CLASSES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": SEEDED,
    "unseeded": {"temperature": 1.0},
    "top_k": {**SEEDED, "top_k": 20},
    "top_p": {**SEEDED, "top_p": 0.8},
    "min_p": {**SEEDED, "min_p": 0.05},
    "top_k, top_p and min_p": {**SEEDED, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {**SEEDED, "frequency_penalty": 0.7},
    "all penalties": {**SEEDED, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    "logprob": {"temperature": 0.0, "logprobs": 0},
    "logprobs": {**SEEDED, "logprobs": 5},
    "logprobs with penalties": {**SEEDED, "logprobs": 3, "repetition_penalty": 1.4, "top_p": 0.9},
}


def job_of(kind: str) -> Job:
    prompt = prompt_of(100, list(CLASSES).index(kind))
    return Job(prompt, SamplingParams(max_tokens=200, ignore_eos=True, **CLASSES[kind]))


async def test_requests_of_every_class_move_five_times(loaded: Loaded) -> None:
    expected = {kind: alone(loaded, kind, job_of(kind)) for kind in CLASSES}
    async with Nodes(builder(loaded), "a", "b") as nodes:
        verify_all(nodes)
        for name, node in nodes.nodes.items():
            slow_down_writing(node, nodes[OTHER[name]])

        async def moved_five_times(kind: str) -> list[dict[str, Any]]:
            await nodes.owner(kind)
            tracked = nodes.client.tracker.requests[kind]
            results = []
            for _ in range(5):
                before = len(tracked.output)
                await until(lambda seen=before: len(tracked.output) > seen + 5)  # type: ignore[misc]
                results.append(await move(nodes, kind, staged(nodes)))
            return results

        running = {kind: asyncio.create_task(stream(nodes, kind, job_of(kind))) for kind in CLASSES}
        by_kind = dict(zip(CLASSES, await asyncio.gather(*map(moved_five_times, CLASSES)), strict=True))
        for kind, results in by_kind.items():
            assert all(r["outcome"] == "moved" and r["mechanism"] == "live" for r in results), (kind, results)
            assert sum(r["blocks_sent"] for r in results) >= 7 and results[1]["blocks_skipped"] >= 6, (kind, results)
            assert await running[kind] == (expected[kind], "length"), kind
        assert max(r["stages"] for results in by_kind.values() for r in results) >= 2, "they went on while being copied"
        await at_rest(nodes)
        assert verified(nodes) == len(CLASSES)


def slow_down_writing(node: EngineNode, source: EngineNode) -> None:
    """What is copied to a node takes ten steps of the source, if that makes any."""
    write = node.taking.write

    async def slowly(message: dict[str, Any]) -> dict[str, Any]:
        steps = source.engine.steps
        with suppress(TimeoutError):
            await until(lambda: source.engine.steps >= steps + 10, 0.5)
        return await write(message)

    node.taking.write = slowly  # type: ignore[method-assign]


def test_the_classes_differ(loaded: Loaded) -> None:
    """Else what makes a class would not have to move along."""
    jobs = {
        kind: Job(prompt_of(100, 0), SamplingParams(max_tokens=60, ignore_eos=True, **edits))
        for kind, edits in CLASSES.items()
        if "logprobs" not in edits
    }
    answers = {tuple(token for token, _ in answer) for answer in run(make_engine(loaded), jobs).values()}
    assert len(answers) == len(jobs)


async def test_kv_damaged_on_its_way_is_found_although_it_is_cached_now(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of("greedy")
    expected = alone(loaded, "r", job)
    async with Nodes(builder(loaded), "a", "b") as nodes:
        verify_all(nodes)
        for node in nodes.nodes.values():
            damage_what_is_written(node)
        running = asyncio.create_task(stream(nodes, "r", job))
        await nodes.owner("r")
        tracked = nodes.client.tracker.requests["r"]
        await until(lambda: len(tracked.output) > 5)
        assert (await move(nodes, "r", staged(nodes)))["outcome"] == "moved"
        answer, _ = await running
        wrong = next(i for i, (got, right) in enumerate(zip(answer, expected, strict=True)) if got[0] != right[0])
        await until(lambda: verified(nodes) == 1)
        assert sum(node.engine.verifier.mismatches for node in nodes.nodes.values()) == 1
        [record] = [r for r in caplog.records if r.levelname == "ERROR"]
        message = f"request r differs from its undisturbed run at token {wrong}: it had {answer[wrong][0]}, "
        assert message in record.getMessage()


def damage_what_is_written(node: EngineNode) -> None:
    write = node.engine.executor.write_blocks
    node.engine.executor.write_blocks = lambda blocks, data: write(blocks, np.zeros_like(data))  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["stop_token_ids", "eos", "ignore_eos"])
async def test_a_moved_request_ends_where_it_should(loaded: Loaded, how: str) -> None:
    plain = Job(prompt_of(60, 2), SamplingParams(max_tokens=150, ignore_eos=True, temperature=1.2, seed=3, logprobs=1))
    whole = alone(loaded, "r", plain)
    ids = [token for token, _ in whole]
    at = next(i for i in range(60, len(ids)) if ids.index(ids[i]) == i)  # a token that comes late for the first time
    eos = {} if how == "stop_token_ids" else {"eos_token_ids": (ids[at],)}
    edits: dict[str, dict[str, Any]] = {"stop_token_ids": {"stop_token_ids": (ids[at],)}, "eos": {"ignore_eos": False}}
    job = Job(plain.prompt, replace(plain.params, **edits.get(how, {})))
    expected = (whole, "length") if how == "ignore_eos" else (whole[: at + 1], "stop")
    async with Nodes(builder(loaded, **eos), "a", "b") as nodes:
        running = asyncio.create_task(stream(nodes, "r", job))
        await nodes.owner("r")
        tracked = nodes.client.tracker.requests["r"]
        for length in (10, 30):
            await until(lambda length=length: len(tracked.output) >= length)  # type: ignore[misc]
            assert (await move(nodes, "r", staged(nodes)))["outcome"] == "moved"
        assert await running == expected
        await at_rest(nodes)


async def test_an_engine_that_drains_gives_away_what_it_prefills_and_what_waits(loaded: Loaded) -> None:
    jobs = {
        "decoding": Job(prompt_of(20, 3), SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0, logprobs=2)),
        "prefilling": Job(prompt_of(900, 4), SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, **SEEDED)),
        "queued": Job(prompt_of(50, 5), SamplingParams(max_tokens=20, ignore_eos=True, repetition_penalty=1.3)),
    }
    expected = {name: alone(loaded, name, job) for name, job in jobs.items()}
    builders = iter(builder(loaded, 0.01, max_num_batched_tokens=24, max_num_seqs=seats) for seats in (2, 8))
    async with Nodes(lambda: next(builders)(), "a", "b") as nodes:
        verify_all(nodes)
        source, arrived = nodes["a"], adoptions(nodes["b"])
        await only(nodes, "a")
        running = {}
        for name, job in jobs.items():
            running[name] = asyncio.create_task(stream(nodes, name, job))
            await nodes.owner(name)
        requests = source.engine.scheduler.requests
        await until(lambda: requests["decoding"].output != [] and requests["prefilling"].computed > 40)
        nodes["b"].state = READY
        drained = asyncio.create_task(source.drain(30.0))
        await asyncio.sleep(0)
        command = {
            "destination": "b",
            "actor": Handle(nodes["b"]),
            "cause": "drain",
            "count": 10,
            "max_blocks": 1 << 20,
            "mechanism": "live",
            "chunk_bytes": 4 * source.block_bytes,
            "settings": replace(source.settings, max_stages=1).to_message(),
        }
        results = []
        async with asyncio.timeout(20.0):
            while requests:  # the destination refuses while somebody waits there
                results += await source.migrate(command)
                await asyncio.sleep(0.01)
        receipt = await drained
        assert (receipt["moved"], receipt["resumed"]) == (3, 0), receipt
        moved = {r["request_id"]: r["mechanism"] for r in results if r["outcome"] == "moved"}
        assert moved == {"decoding": "live", "prefilling": "live", "queued": "requeue"}, results
        by_id = {adoption.id: adoption for adoption in arrived}
        assert by_id["decoding"].output > 0 and by_id["decoding"].reserved
        assert by_id["prefilling"].output == 0 and 40 < by_id["prefilling"].computed < 900
        assert not by_id["queued"].reserved
        for name in jobs:
            assert await running[name] == (expected[name], "length"), name
        await at_rest(nodes)
        assert verified(nodes) == 3


@pytest.mark.parametrize("preempt", ["SWAP", "RECOMPUTE"])
async def test_what_was_preempted_moves_too(loaded: Loaded, preempt: str) -> None:
    """Queued ones, whose KV may be in the source's host tier, and those that have come back from there."""
    edits = list(CLASSES.values())
    jobs = {
        f"p{i}": Job(prompt_of(30, i), SamplingParams(max_tokens=100, ignore_eos=True, **edits[i])) for i in range(8)
    }
    expected = {name: alone(loaded, name, job) for name, job in jobs.items()}
    small, large = builder(loaded, blocks=24, host=200, preempt=preempt), builder(loaded)
    builders = iter([small, large])
    async with Nodes(lambda: next(builders)(), "a", "b") as nodes:
        source, scheduler = nodes["a"], nodes["a"].engine.scheduler
        await only(nodes, "a")
        running = {name: asyncio.create_task(stream(nodes, name, job)) for name, job in jobs.items()}
        await until(lambda: scheduler.preemptions > 0)
        nodes["b"].state = READY
        moved: dict[str, str] = {}

        def preempted() -> dict[str, Request]:
            found = [r for r in scheduler.requests.values() if r.preemptions and r.id not in moved]
            found.sort(key=lambda r: r.status is Status.WAITING)
            # Two of those that run again, then two of those that wait
            kinds = {Status.RUNNING: 2 - list(moved.values()).count("live"), Status.WAITING: 2}
            return {r.id: r for r in found if kinds.get(r.status, 0) > 0}

        while len(moved) < 4 and scheduler.requests:
            for name, request in (await source.thread.call(preempted)).items():
                if request.status is Status.WAITING and list(moved.values()).count("requeue") >= 2:
                    continue
                result = await source.giving.move(name, "b", Handle(nodes["b"]), staged(nodes, 4))
                if result["outcome"] == "moved":
                    moved[name] = result["mechanism"]
                    break
            await asyncio.sleep(STEP_S)
        assert sorted(moved.values()) == ["live", "live", "requeue", "requeue"], moved
        for name in jobs:
            assert await running[name] == (expected[name], "length"), name
        if preempt == "SWAP":
            assert scheduler.pool.host.slots, "the host tier was used"
        await at_rest(nodes)


async def test_prefixes_shared_at_both_ends(loaded: Loaded) -> None:
    common = prompt_of(70, 9)  # four full blocks
    jobs = {
        f"s{i}": Job([*common, *prompt_of(20, i)], SamplingParams(max_tokens=120, ignore_eos=True, **edits))
        for i, edits in enumerate((CLASSES["greedy"], CLASSES["logprobs"], CLASSES["all penalties"]))
    }
    expected = {name: alone(loaded, name, job) for name, job in jobs.items()}
    async with Nodes(builder(loaded), "a", "b") as nodes:
        await only(nodes, "b")
        resident = asyncio.create_task(stream(nodes, "s0", jobs["s0"]))
        await nodes.owner("s0")
        nodes["b"].state = nodes["a"].state = READY
        await only(nodes, "a")
        requests = nodes["a"].engine.scheduler.requests
        running = {}
        for name in ("s1", "s2"):
            running[name] = asyncio.create_task(stream(nodes, name, jobs[name]))
            await until(lambda name=name: name in requests and len(requests[name].output) > 5)  # type: ignore[misc]
        assert requests["s1"].blocks[:4] == requests["s2"].blocks[:4], "shared at the source"
        nodes["b"].state = READY
        result = await move(nodes, "s1", staged(nodes))
        assert (result["outcome"], result["blocks_skipped"]) == ("moved", 4)
        there = nodes["b"].engine.scheduler.requests
        assert there["s1"].blocks[:4] == there["s0"].blocks[:4], "and at the destination"
        result = await move(nodes, "s1", staged(nodes))
        assert result["outcome"] == "moved", result
        assert requests["s1"].blocks[:4] == requests["s2"].blocks[:4]
        for name, task in (("s0", resident), *running.items()):
            assert await task == (expected[name], "length"), name
        await at_rest(nodes)


async def test_64_requests_and_200_moves_at_random_moments(loaded: Loaded) -> None:
    source = random.Random(0)
    common = prompt_of(40, 77)
    jobs = {}
    for i in range(64):
        prompt = [*(common if i % 4 == 0 else []), *prompt_of(source.randrange(1, 300), i)]
        edits = list(CLASSES.values())[i % len(CLASSES)] | {"logprobs": (None, 0, 3)[i % 3]}
        edits |= {"seed": i} if "seed" in edits else {}
        params = SamplingParams(max_tokens=source.randrange(100, 300), ignore_eos=True, **edits)
        jobs[f"r{i}"] = Job(prompt, params)
    undisturbed = run(make_engine(loaded, blocks=2000), jobs)
    for name in ("r0", "r13", "r30", "r47"):
        assert undisturbed[name] == alone(loaded, name, jobs[name])
    moves = {"moved": 0, "skipped": 0, "stages": 0}

    async with Nodes(builder(loaded, blocks=1200, max_num_batched_tokens=256), "a", "b") as nodes:
        verify_all(nodes, 0.1)

        async def arrive(name: str, delay: float) -> tuple[Answer, str]:
            await asyncio.sleep(delay)
            return await stream(nodes, name, jobs[name])

        async def shuffle(seed: int) -> None:
            mine = random.Random(seed)
            while moves["moved"] < 200:
                owned = [
                    (name, request.id)
                    for name, node in nodes.nodes.items()
                    for request in list(node.engine.scheduler.requests.values())
                    if request.id not in node.giving.moves
                ]
                if not owned:
                    await asyncio.sleep(STEP_S)
                    if all(task.done() for task in running.values()):
                        return
                    continue
                at, name = mine.choice(owned)
                kinds = [*[Mechanism.LIVE] * 5, Mechanism.STOP_AND_COPY, Mechanism.RECOMPUTE, Mechanism.REQUEUE]
                options = staged(nodes, mine.choice([2, 3, 8, 1000]), mine.choice(kinds))
                result = await nodes[at].giving.move(name, OTHER[at], Handle(nodes[OTHER[at]]), options)
                moves["moved"] += result["outcome"] == "moved"
                moves["skipped"] += result["blocks_skipped"]
                moves["stages"] += result["stages"]

        running = {name: asyncio.create_task(arrive(name, source.random())) for name in jobs}
        await asyncio.gather(*(shuffle(seed) for seed in range(8)))
        for name in jobs:
            assert await running[name] == (undisturbed[name], "length"), name
        assert moves["moved"] >= 200 and moves["skipped"] > 0 and moves["stages"] > 20, moves
        await at_rest(nodes)
        assert verified(nodes) > 3
