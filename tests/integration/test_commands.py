"""The commands as their users run them: start, first answer, wrong input, Ctrl-C under streams."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.command import Command, running
from tests.integration.service import wait_for
from tests.integration.streams import Result, bodies, run_streams, until
from tests.machine import slowdown
from tests.models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2.yaml"


@pytest.fixture(scope="module")
def endless_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that can go on for longer than a shutdown lasts."""
    return make_llama(tmp_path_factory.mktemp("endless"), max_position_embeddings=32768)


def chat(command: Command, model: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    answer = httpx.post(f"{command.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def serve_tiny(model: Path) -> tuple[str, ...]:
    return (
        *("ferry", "serve", "--model", str(model), "--served_model_name", "tiny", "--port", "{port}"),
        *("--dtype", "float32", "--kv_cache_memory_bytes", str(256 << 20), "--swap_space", "0", "--threads", "1"),
    )


def test_an_interrupt_under_streams_ends_each_whole_or_with_one_typed_error(endless_llama: Path) -> None:
    short, long = bodies(4, 400), bodies(4, 32000)
    with running(*serve_tiny(endless_llama)) as command:
        command.wait_for_text("Ferry is ready: ")
        assert command.listening() == {"127.0.0.1"}
        expected = run_streams(command.url, short)
        ended: list[float] = []

        async def interrupt(results: list[Result]) -> None:
            await until(lambda: all(len(result.tokens) > 10 for result in results))
            assert not any(result.done for result in results)
            command.interrupt()
            started = time.monotonic()
            async with httpx.AsyncClient(base_url=command.url) as client:
                phase: dict[str, Any] = {}
                while phase.get("phase") != "shutting down":
                    phase = (await client.get("/health")).json()
                refused = await client.post("/v1/completions", json=short[0])
                assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
            await until(lambda: all(result.done for result in results))
            ended.append(time.monotonic() - started)

        results = run_streams(command.url, short + long, interrupt)
        assert ended[0] < 5.5
        assert results[:4] == expected
        for result in results[4:]:  # streams.py refuses anything between an error and [DONE]
            assert result.done and result.finish_reason is None and len(result.tokens) > 10
            assert result.error is not None and result.error["code"] == "service_unavailable"
            assert "shutting down" in result.error["message"]
        assert command.process.wait(10) == 0
        assert "Traceback" not in command.text
        command.wait_gone()


def test_a_second_interrupt_ends_at_once(endless_llama: Path) -> None:
    with running(*serve_tiny(endless_llama)) as command:
        command.wait_for_text("Ferry is ready: ")

        async def interrupt(results: list[Result]) -> None:
            await until(lambda: all(len(result.tokens) > 10 for result in results))
            command.interrupt()
            await asyncio.to_thread(command.wait_for_text, "Stopping")
            started = time.monotonic()
            command.interrupt()
            assert await asyncio.to_thread(command.process.wait, 10) == 128 + signal.SIGINT
            assert (time.monotonic() - started) / slowdown() < 2.0

        with pytest.raises(httpx.TransportError):
            run_streams(command.url, bodies(4, 32000), interrupt)
        command.wait_gone()


def test_plain_serve_run_serves_the_demo(tmp_path: Path) -> None:
    file = tmp_path / "smollm2.yaml"
    with running("serve", "run", str(file)) as command:  # it reads the file a moment later
        file.write_text(CONFIG.read_text().replace("port: 8000", f"port: {command.port}"))
        command.wait_healthy()
        assert chat(command, "demo:smollm2")["choices"][0]["message"]["content"]
        command.interrupt()
        command.process.wait(30)
        command.wait_gone()


def test_plain_serve_run_ends_its_log_with_our_sentence(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(CONFIG.read_text().replace("num_replicas: 2", "num_replicaz: 2"))
    sentence = "--num_replicaz is not a known parameter, did you mean num_replicas?"
    with running("serve", "run", str(file)) as command:
        # Ray tries the builder several times, and tells of each; what remains on the screen is the controller's report.
        wait_for(lambda: "Deploying app 'llm' failed" in command.text, 60, "the controller's report")
        wait_for(lambda: command.last_line("ServeController").endswith(sentence), 10, f"our sentence\n{command.text}")


@pytest.mark.parametrize("model", ["a directory", "demo:smollm2"])
def test_blade_llm_server_serves(model: str, tiny_llama: Path) -> None:
    model = str(tiny_llama) if model == "a directory" else model
    with running("blade_llm_server", "--model", model, "--port", "{port}") as command:
        command.wait_for_text("Ferry is ready: ")
        assert command.listening() == {"0.0.0.0"}  # BladeLLM's default
        assert chat(command, model)["usage"]["completion_tokens"] <= 8
        command.interrupt(signal.SIGTERM)
        assert command.process.wait(20) == 0
        command.wait_gone()
