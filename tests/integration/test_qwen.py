"""configs/qwen.yaml with a tiny model of its family in the place of the real one."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
import yaml

from tests.integration.command import running
from tests.integration.service import free_port
from tests.models import make_qwen3

CONFIG = Path(__file__).parents[2] / "configs" / "qwen.yaml"


@pytest.mark.slow
def test_the_qwen_configuration_serves_chat(tmp_path: Path) -> None:
    model = str(make_qwen3(tmp_path / "qwen3", max_position_embeddings=8192))
    document = yaml.safe_load(CONFIG.read_text())
    document["applications"][0]["args"]["model"] = model
    document["http_options"]["port"] = port = free_port()
    file = tmp_path / "qwen.yaml"
    file.write_text(yaml.safe_dump(document))
    with running("ferry", "serve", str(file)) as command:
        command.wait_for_text("Ferry is ready: ")
        assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in command.last_line()
        models = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in models] == [(model, 8192)]
        body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        choice = answer.json()["choices"][0]
        assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("stop", "length")
        assert 1 <= answer.json()["usage"]["completion_tokens"] <= 8
        command.interrupt(signal.SIGTERM)
        assert command.process.wait(20) == 0
        command.wait_gone()
