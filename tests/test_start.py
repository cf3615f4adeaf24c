"""Starting and stopping the service as a process, with a small stand-in for the application."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine import slowdown

ROOT = Path(__file__).parent.parent
SCRIPT = """
import os, sys, time, types

import ray
from fastapi import FastAPI
from ray import serve

mode, port = sys.argv[1], int(sys.argv[2])
api = FastAPI()

@serve.deployment(name="Ingress", graceful_shutdown_timeout_s=60, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Ingress:
    def __init__(self):
        if mode == "fail":
            raise ValueError("bad weights: tensor x is missing")

    @api.get("/health")
    def health(self):
        return "ok"

def drain(seconds):
    print("draining", flush=True)
    if mode == "slow":
        time.sleep(60)

app = types.ModuleType("serving.app")
app.build = lambda args: Ingress.bind()
app.drain = drain
sys.modules["serving.app"] = app

import serving.cli.command as command
from serving.cli import main

command.check_plan = lambda plan, weights: None
sys.exit(main.main(["serve", "--model", "m", "--port", str(port)]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Service:
    def __init__(self, folder: Path) -> None:
        self.script = folder / "service.py"
        self.script.write_text(SCRIPT)
        self.log = folder / "log.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, mode: str, port: int) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        env.update(PYTHONPATH=str(ROOT), RAY_AUTH_MODE="disabled")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(self.script), mode, str(port)], env=env, stdout=out, stderr=subprocess.STDOUT
            )
        return self.process

    def wait_for(self, text: str, limit_s: float = 90) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.log.read_text():
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    if service.process and service.process.poll() is None:
        service.process.kill()
        service.process.wait(10)


def test_ready_is_the_last_line_and_sigterm_ends_within_the_limit(service: Service, port: int) -> None:
    process = service.start("ok", port)
    service.wait_for("Ferry is ready: ")
    last = service.log.read_text().splitlines()[-1]
    assert last.startswith(f"Ferry is ready: curl http://127.0.0.1:{port}/v1/chat/completions ")
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert process.wait(20) == 0
    assert (time.monotonic() - started) / slowdown() < 12
    assert "draining" in service.log.read_text()
    assert "Traceback" not in service.log.read_text()


def test_a_second_signal_ends_at_once(service: Service, port: int) -> None:
    process = service.start("slow", port)
    service.wait_for("Ferry is ready: ")
    process.send_signal(signal.SIGINT)
    service.wait_for("draining")
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 128 + signal.SIGINT
    assert (time.monotonic() - started) / slowdown() < 2


def test_a_failed_start_prints_the_cause_alone(service: Service, port: int) -> None:
    process = service.start("fail", port)
    assert process.wait(120) == 2
    text = service.log.read_text()
    assert text.splitlines()[-1] == "ferry: error: bad weights: tensor x is missing"
    assert "Traceback" not in text


def test_a_port_in_use_is_one_line(service: Service) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = service.start("ok", taken.getsockname()[1])
        assert process.wait(60) == 2
    lines = service.log.read_text().splitlines()
    assert len(lines) == 1
    assert "cannot be used: Address already in use" in lines[0]
