"""Rescheduling as its users see it: /cluster, moves by operators, ferry top, priorities, the parameters' effects."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from serving.cli import main
from tests.integration.service import Service, wait_for
from tests.integration.streams import Result, bodies, run_streams, until

STEP_S = 0.01  # of a paced engine
TOKENS = 300
SHAPE = {"message", "type", "param", "code"}
MOVE_KEYS = {
    *("request_id", "source", "destination", "cause", "outcome", "blocks_sent", "blocks_skipped", "duration_ms"),
    *("downtime_ms", "at"),
}


def two_engines(model: Path, **more: Any) -> dict[str, Any]:
    """A tiny Llama in bfloat16, where a wrong rounding shows."""
    options = {"model": str(model), "num_replicas": 2, "dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20}
    return {**options, "max_model_len": 1024, **more}


@pytest.fixture
def service(application: Service, long_llama: Path) -> Service:
    return application.ensure(**two_engines(long_llama))


def cluster(service: Service) -> dict[str, Any]:
    response = httpx.get(f"{service.url}/cluster", timeout=10)
    assert response.status_code == 200
    return response.json()


def owners(service: Service) -> dict[str, str]:
    """Request -> its replica."""
    return {request["id"]: r["id"] for r in cluster(service)["replicas"] for request in r["requests"]}


def other(service: Service, replica: str) -> str:
    return next(r["id"] for r in cluster(service)["replicas"] if r["id"] != replica)


def migrate(service: Service, **body: Any) -> httpx.Response:
    return httpx.post(f"{service.url}/cluster/migrate", json=body, timeout=60)


def error_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert set(error) == SHAPE
    return error["message"]


def long_body(tokens: int = TOKENS, start: int = 0, **more: Any) -> dict[str, Any]:
    """So long a prompt that copying it is cheaper than computing it again; another one for another start."""
    prompt = [10 + (i + start) % 180 for i in range(600)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, **more}


def moved_once(service: Service, body: dict[str, Any]) -> tuple[dict[str, Any], Result]:
    """A stream that an operator moves in its midst: the move as it was answered, and the stream."""
    answers: list[httpx.Response] = []

    def push() -> None:
        ((request, replica),) = owners(service).items()
        answers.append(migrate(service, request_id=request, destination=other(service, replica)))

    async def disturb(results: list[Result]) -> None:
        await until(lambda: results[0].chunks >= 20)
        await asyncio.to_thread(push)

    with service.paced(STEP_S):
        (result,) = run_streams(service.url, [body], disturb)
    assert answers[0].status_code == 200, answers[0].text
    return answers[0].json(), result


def samples(service: Service) -> list[Any]:
    text = httpx.get(f"{service.url}/metrics", timeout=10).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(service: Service, name: str, **labels: str) -> float:
    return sum(s.value for s in samples(service) if s.name == name and labels.items() <= s.labels.items())


def test_a_stream_moved_by_an_operator_is_the_same_and_everybody_sees_the_move(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    body = long_body(start=1, temperature=1.0, seed=5)
    moves = total(service, "ferry_moves_total", cause="operator", outcome="moved")
    downtimes = total(service, "ferry_move_downtime_seconds_count", cause="operator")
    move, result = moved_once(service, body)
    (calm,) = run_streams(service.url, [body])  # afterwards: before, it would fill the destination's cache
    assert result == calm and result.completion_tokens == TOKENS
    assert set(move) >= MOVE_KEYS
    assert (move["cause"], move["outcome"], move["mechanism"]) == ("operator", "moved", "live")
    assert move["blocks_sent"] + move["blocks_skipped"] >= 38  # 600 tokens and more

    def told() -> dict[str, Any]:
        return cluster(service)["moves"][-1]

    wait_for(lambda: told()["downtime_ms"] is not None, 5, "the downtime that the client saw")
    seen = told()
    assert seen == {**move, "downtime_ms": seen["downtime_ms"]}
    assert 0 < seen["downtime_ms"] < 1000
    assert main.main(["top", "--once", "--url", service.url]) == 0
    screen = capsys.readouterr().out
    assert "2/2 replicas ready" in screen and "rescheduling: only drains and operators" in screen
    (line,) = (line for line in screen.splitlines() if move["request_id"][-11:] in line)
    assert "operator" in line and "moved" in line and f"{seen['downtime_ms']:.1f} ms" in line

    assert total(service, "ferry_moves_total", cause="operator", outcome="moved") == moves + 1
    assert total(service, "ferry_move_downtime_seconds_count", cause="operator") == downtimes + 1
    assert total(service, "ferry_move_blocks_sent_total") >= move["blocks_sent"]
    assert total(service, "ferry_move_bytes_total") >= move["bytes"] > 0
    assert total(service, "ferry_move_stages_total") >= 1
    replicas = set(service.engines())
    for name in ("ferry_freeness_steps", "ferry_reservations_expired_total"):
        assert {s.labels["replica"] for s in samples(service) if s.name == name} == replicas
    assert total(service, "ferry_dispatches_total", policy="llumnix") >= 2
    service.wait_idle()


def test_the_shape_of_the_cluster(service: Service) -> None:
    seen: list[dict[str, Any]] = []

    async def look(results: list[Result]) -> None:
        await until(lambda: results[0].chunks >= 5)
        seen.append(await asyncio.to_thread(cluster, service))

    with service.paced(STEP_S):
        run_streams(service.url, [long_body(60, priority=-2)], look)
    assert set(seen[0]) == {"replicas", "moves", "manager"} and len(seen[0]["replicas"]) == 2
    for replica in seen[0]["replicas"]:
        assert (replica["role"], replica["state"]) == ("mixed", "ready")
        assert set(replica["blocks"]) == {"total", "free", "cached"} and replica["freeness"] > 0
    (request,) = (request for replica in seen[0]["replicas"] for request in replica["requests"])
    assert set(request) == {"id", "status", "priority", "tokens"}
    assert (request["status"], request["priority"]) == ("running", -2) and request["tokens"] > 600
    assert service.handle.cluster.remote().result(timeout_s=10)["replicas"][0].keys() == seen[0]["replicas"][0].keys()


def test_what_an_operator_cannot_have_is_told_in_openais_shape(service: Service) -> None:
    found: dict[str, tuple[int, str]] = {}

    def ask() -> None:
        ((request, replica),) = owners(service).items()
        for name, body in {
            "replica": {"request_id": request, "destination": "nobody"},
            "request": {"request_id": "cmpl-none", "destination": replica},
            "here": {"request_id": request, "destination": replica},
            "body": {"request_id": request},
            "field": {"request_id": request, "destination": replica, "force": True},
        }.items():
            response = migrate(service, **body)
            found[name] = response.status_code, error_of(response)

    async def disturb(results: list[Result]) -> None:
        await until(lambda: results[0].chunks >= 5)
        await asyncio.to_thread(ask)

    with service.paced(STEP_S):
        run_streams(service.url, [long_body()], disturb)
    assert {name: status for name, (status, _) in found.items()} == {
        "replica": 404, "request": 404, "here": 409, "body": 400, "field": 400,
    }  # fmt: skip
    assert "no replica 'nobody'" in found["replica"][1] and "is on" in found["here"][1]
    response = httpx.post(f"{service.url}/cluster/migrate", content=b"{", timeout=10)
    assert response.status_code == 400 and "JSON" in error_of(response)
    assert httpx.get(f"{service.url}/cluster/migrate", timeout=10).status_code == 405


def processes() -> dict[int, str]:
    """The service's processes by what they host."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            name = " ".join(process.cmdline())
        except psutil.Error:  # it has just ended
            continue
        if "ServeReplica:llm" in name or "EngineActor" in name:
            found[process.pid] = name
    return found


def test_without_a_manager_operators_are_told_so(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    (pid,) = (pid for pid, name in processes().items() if "Manager" in name)
    os.kill(pid, signal.SIGSTOP)
    try:
        for limit_s, response in (
            (3, httpx.get(f"{service.url}/cluster", timeout=10)),
            (2, migrate(service, request_id="r", destination="d")),
        ):
            assert response.status_code == 503 and response.headers["Retry-After"] == "1"
            assert error_of(response) == f"the manager does not answer within {limit_s} s"
        assert main.main(["top", "--once", "--url", service.url]) == 1
        assert "answers 503: the manager does not answer within 3 s" in capsys.readouterr().err
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: service.num_ready() == 2, 20, "a manager that knows both engines")


def test_a_priority_in_the_header_is_the_requests(service: Service) -> None:
    def ask(header: str, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": [5], "max_tokens": 100, "ignore_eos": True, **fields}
        return httpx.post(f"{service.url}/v1/completions", json=body, headers={"X-Priority": header}, timeout=60)

    with service.paced(STEP_S):

        async def beside() -> None:
            running = asyncio.create_task(asyncio.to_thread(ask, "-7"))
            await until(lambda: bool(owners(service)))
            priorities = [q["priority"] for r in cluster(service)["replicas"] for q in r["requests"]]
            assert priorities == [-7]
            assert (await running).status_code == 200

        asyncio.run(beside())
    assert ask("3", priority=3, max_tokens=1).status_code == 200
    for response, param in ((ask("3", priority=4), "priority"), (ask("high"), "X-Priority")):
        assert response.status_code == 400 and error_of(response)
        assert response.json()["error"]["param"] == param


# Parameters


# A replica with four requests gives, one with up to two takes: automatic moves without a crowd.
EAGER = {"migrate_out_share": 0.3, "migrate_in_share": 0.3, "move_cooldown_s": 0.0, "pairing_interval_s": 0.05}


def crowded(service: Service) -> tuple[Counter[str], list[Result]]:
    """Streams that are all pushed to one replica, and the causes of the moves that this led to."""
    before = len(cluster(service)["moves"])
    left = Counter[str]()

    def push() -> None:
        target = cluster(service)["replicas"][0]["id"]
        for request, replica in owners(service).items():
            if replica != target:
                assert migrate(service, request_id=request, destination=target).status_code in (200, 409)

    async def disturb(results: list[Result]) -> None:
        await until(lambda: all(result.chunks >= 5 for result in results))
        await asyncio.to_thread(push)
        await asyncio.sleep(1.0)
        left.update((await asyncio.to_thread(owners, service)).values())

    with service.paced(STEP_S):
        results = run_streams(service.url, bodies(6, TOKENS), disturb)
    assert all(result.done and result.completion_tokens == TOKENS for result in results)
    causes = Counter(move["cause"] for move in cluster(service)["moves"][before:] if move["outcome"] == "moved")
    return causes + Counter(crowd=max(left.values())), results


@pytest.mark.slow
def test_the_parameters_of_rescheduling_have_their_effects(application: Service, long_llama: Path) -> None:
    service = application.ensure(
        **two_engines(long_llama),
        enable_llumnix=True,
        llumnix_config={**EAGER, "dispatch_policy": "round_robin"},
        kv_transfer_config={"transfer_mode": "sync", "compression": "zlib", "batch_size": 3},
    )
    shown = cluster(service)["manager"]
    assert shown["settings"]["enable_moves"] and shown["settings"]["migrate_out_share"] == 0.3
    asked = {"transfer_mode": "sync", "compression": "zlib", "batch_size": 3}
    assert shown["kv_transfer"] | asked == shown["kv_transfer"]

    causes, _ = crowded(service)  # enable_llumnix and the thresholds of llumnix_config
    assert causes["balance"] >= 2 and causes["crowd"] < 6

    wait_for(lambda: total(service, "ferry_dispatches_total", policy="round_robin") >= 6, 5, "counts by policy")
    sent = Counter(s.labels["replica"] for s in samples(service) if s.name == "ferry_dispatches_total")
    assert len(sent) == 2

    def count(actor: Any) -> None:
        actor.sizes = []
        write = type(actor.taking).write

        async def counting(message: Any) -> Any:
            actor.sizes.append(message["data"]["shape"][0])
            return await write(actor.taking, message)

        actor.taking.write = counting

    def sizes(actor: Any) -> list[int]:
        return actor.sizes

    service.inside(count)
    move, result = moved_once(service, long_body(start=2, temperature=0))
    written = [size for one in service.inside(sizes).values() for size in one]
    assert move["mechanism"] == "stop_and_copy" and move["stages"] == 0  # sync
    assert max(written) == 3 and len(written) >= 10  # batch_size
    block_bytes = set(service.inside(lambda actor: actor.block_bytes).values())
    assert move["bytes"] != move["blocks_sent"] * block_bytes.pop()  # zlib
    service.wait_idle()

    service = application.ensure(**two_engines(long_llama))  # the defaults
    service.inside(count)
    move, again = moved_once(service, long_body(start=2, temperature=0))
    written = [size for one in service.inside(sizes).values() for size in one]
    assert again == result == run_streams(service.url, [long_body(start=2, temperature=0)])[0]
    assert move["mechanism"] == "live"
    assert len(written) <= 4 and max(written, default=0) > 3
    block_bytes = set(service.inside(lambda actor: actor.block_bytes).values())
    assert move["bytes"] == move["blocks_sent"] * block_bytes.pop()


@pytest.mark.slow
def test_the_managers_user_config_changes_while_everything_runs(application: Service, long_llama: Path) -> None:
    application.delete()
    args = {**two_engines(long_llama), "served_model_name": ["tiny"], "log_level": "WARNING", "swap_space": 0.05}
    args |= {"threads": 1, "num_cpus_per_replica": 1, "llumnix_config": EAGER}

    def deploy(**more: Any) -> None:
        document = {"name": "llm", "route_prefix": "/", "import_path": "serving.app:build", "args": args, **more}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [document]}))

    def settings() -> dict[str, Any]:
        return cluster(application)["manager"]["settings"]

    deploy()
    application.options = {"deployed by": "a configuration"}  # not one of ensure's
    application.wait_ready(replicas=2)
    before = processes()
    assert len(before) == 6  # an ingress, a manager, two engines with their replicas
    assert not settings()["enable_moves"]
    causes, calm = crowded(application)
    assert causes["balance"] == 0 and causes["crowd"] == 6  # without enable_llumnix only operators move requests

    live = {"llumnix": {**EAGER, "dispatch_policy": "least_requests"}, "kv_transfer": {"compression": "zlib"}}
    deploy(deployments=[{"name": "Manager", "user_config": live}])
    wait_for(lambda: settings()["enable_moves"], 20, "the new settings")
    assert cluster(application)["manager"]["kv_transfer"]["compression"] == "zlib"
    body = {"model": "tiny", "prompt": [5], "max_tokens": 1}

    def dispatched() -> float:
        return total(application, "ferry_dispatches_total", policy="least_requests")

    def in_force() -> bool:
        httpx.post(f"{application.url}/v1/completions", json=body, timeout=10)
        return dispatched() > 0

    wait_for(in_force, 10, "the ingress's new policy")
    application.wait_idle()
    before_crowd = dispatched()
    causes, disturbed = crowded(application)
    assert causes["balance"] >= 2 and causes["crowd"] < 6
    assert disturbed == calm
    wait_for(lambda: dispatched() >= before_crowd + 6, 5, "counts of the new policy")

    deploy(deployments=[{"name": "Manager", "user_config": {"llumnix": {"max_move": 1}}}])
    wait_for(lambda: "max_move" in cluster(application)["manager"]["settings_error"], 20, "a refusal")
    assert settings()["migrate_out_share"] == 0.3
    assert set(processes()) == set(before), "a process was restarted"
    application.wait_idle()
    application.delete()
