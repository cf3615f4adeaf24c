"""A command of ours as its users run it: a process, with a Ray of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil

from tests.integration.service import free_port, wait_for

BIN = Path(sys.executable).parent
DECORATION = re.compile(r"\x1b\[[0-9;]*m|^\(\w+ pid=\d+\)")


class Command:
    """`argv` may hold {port}, which becomes a free one. Output goes to a file: `text` is what there is so far."""

    def __init__(self, *argv: str):
        self.port = free_port()
        self.folder = tempfile.mkdtemp(prefix="ferry-", dir="/tmp")  # short: Ray's sockets live below it
        self.log = Path(self.folder) / "output.txt"
        env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        env |= {"RAY_TMPDIR": self.folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        command = [str(BIN / argv[0]), *(word.format(port=self.port) for word in argv[1:])]
        with self.log.open("wb") as out:
            # A shell's background jobs ignore SIGINT, and so would what they start.
            heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, preexec_fn=heed)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_line(self, source: str = "") -> str:
        """Without its decoration; `source`: of the process that Ray names so. Lines of several come in any order."""
        lines = [line for line in self.text.splitlines() if source in line]
        bare = [DECORATION.sub("", DECORATION.sub("", line)).strip() for line in lines]
        return next((line for line in reversed(bare) if line), "")

    def wait_for_text(self, text: str, timeout_s: float = 90) -> None:
        try:
            wait_for(lambda: text in self.text or self.process.poll() is not None, timeout_s, text)
            assert text in self.text
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None

    def wait_healthy(self, timeout_s: float = 90) -> None:
        wait_for(
            lambda: httpx.get(f"{self.url}/health", timeout=5).status_code == 200, timeout_s, self.text or "health"
        )

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def family(self) -> list[psutil.Process]:
        """Every process of this command's Ray, however it was started: all inherit its folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_TMPDIR") == self.folder and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # it has just ended, or is not ours to look at
                continue
        return found

    def listening(self) -> set[str]:
        """The addresses at which its port is open."""
        connections = [c for process in self.family() for c in process.net_connections("inet")]
        return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == self.port}

    def wait_gone(self, timeout_s: float = 15) -> None:
        wait_for(lambda: not self.family(), timeout_s, "end of every process")


@contextmanager
def running(*argv: str) -> Iterator[Command]:
    """The command; whatever it leaves behind is killed."""
    command = Command(*argv)
    try:
        yield command
    finally:
        for process in command.family():
            process.kill()
        command.process.wait(10)
        shutil.rmtree(command.folder, ignore_errors=True)
