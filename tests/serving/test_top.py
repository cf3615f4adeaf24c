"""`ferry top`: what a frame says, and a service that is not there."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from serving.cli import main, top
from tests.integration.service import free_port

REPLICA = {
    "id": "a" * 20,
    "role": "mixed",
    "state": "ready",
    "phase": "",
    "blocks": {"total": 100, "free": 40, "cached": 10},
    "freeness": 160.4,
    "running": 2,
    "waiting": 1,
    "requests": [{"id": f"r{i}", "status": s, "priority": 0, "tokens": 9} for i, s in enumerate(["running", "moving"])],
}
STARTING = REPLICA | {
    "id": "b", "state": "starting", "phase": "loading weights", "requests": [],
    "blocks": {"total": 0, "free": 0, "cached": 0},
}  # fmt: skip
MOVE = {
    "request_id": "chatcmpl-0123456789-0",
    "source": "a" * 20,
    "destination": "b",
    "cause": "balance",
    "outcome": "moved",
    "reason": "",
    "mechanism": "live",
    "blocks_sent": 12,
    "blocks_skipped": 3,
    "duration_ms": 45.2,
    "downtime_ms": 7.81,
    "at": 90.0,
}
FAILED = MOVE | {"outcome": "aborted", "reason": "there is no room", "downtime_ms": None, "at": 99.0}
SETTINGS = {"enable_moves": True, "dispatch_policy": "llumnix"}
CLUSTER = {"replicas": [REPLICA, STARTING], "moves": [MOVE, FAILED], "manager": {"settings": SETTINGS}}


def text_of(cluster: dict[str, Any], **rest: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(top.frame(cluster, 100.0, **rest))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_for_each_replica() -> None:
    lines = text_of(CLUSTER).splitlines()
    assert "1/2 replicas ready" in lines[0] and "rescheduling: on" in lines[0] and "1 aborted, 1 moved" in lines[0]
    assert lines[2].split() == ["a" * 12, "mixed", "ready", top.bar(60, 10, 100).plain, "60/100", "160", "1", "0", "1"]
    assert "starting: loading weights" in lines[3] and lines[3].split()[-3:] == ["2", "1", "0"]  # as it last reported


def test_a_line_for_each_move_newest_first() -> None:
    lines = text_of(CLUSTER).splitlines()[-2:]
    assert "aborted: there is no room" in lines[0] and lines[0].startswith(" 1 s")
    assert lines[1].split()[:7] == ["10", "s", "…123456789-0", "a" * 12, "b", "balance", "moved"]
    assert lines[1].split()[7:] == ["live", "12+3", "45", "ms", "7.8", "ms"]


def test_an_idle_cluster_and_one_that_went_away() -> None:
    empty = {"replicas": [], "moves": [], "manager": {}}
    assert "0/0 replicas ready" in text_of(empty) and "no request has moved yet" in text_of(empty)
    assert "nobody there; this is the last answer" in text_of(empty, error="nobody there")


@pytest.mark.parametrize(
    ("used", "cached", "bar"),
    [(0, 0, "·" * 24), (1, 0, "█" + "·" * 23), (100, 0, "█" * 24), (50, 50, "█" * 12 + "░" * 12)],
)
def test_a_bar_shows_any_use_and_is_full_only_when_it_is(used: int, cached: int, bar: str) -> None:
    assert top.bar(used, cached, 100).plain == bar
    assert len(top.bar(0, 0, 0).plain) == 24


@contextmanager
def answering(status: int, body: Any) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/cluster" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_one_frame_for_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, CLUSTER) as url:
        assert main.main(["top", "--once", "--url", f"{url}/"]) == 0
    out = capsys.readouterr().out
    assert "replicas ready" in out and "balance" in out and "\x1b" not in out


def test_a_service_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main.main(["top", "--url", url]) == 1
    assert capsys.readouterr().err == (
        f"ferry top: error: no service at {url} (Connection refused); start one with ferry serve, or give --url\n"
    )


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (503, {"error": {"message": "the manager does not answer"}}, "answers 503: the manager does not answer"),
        (404, [], "answers 404: Not Found"),
        (200, {"other": 1}, "answers, but is no Ferry service"),
        (200, [], "answers, but is no Ferry service"),
    ],
)
def test_other_answers_are_one_line(status: int, body: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(status, body) as url:
        assert main.main(["top", "--once", "--url", url]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--url", "nowhere"], ["--url", "ftp://x"]])
def test_a_wrong_address(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--once", *arguments]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("value", ["0", "soon", "nan", "inf"])
def test_a_wrong_interval(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as wrong:
        main.main(["top", "--interval", value])
    assert wrong.value.code == 2
    assert f"is {value!r}, must be a number of at least 0.1" in capsys.readouterr().err
