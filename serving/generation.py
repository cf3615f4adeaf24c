"""From one API request to text: tokenise, generate, detokenise, stop strings. What HTTP and handle calls share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from engine.sampling.params import SamplingParams
from engine.step import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from serving import messages
from serving.engine_client import EngineClient
from serving.ingress_metrics import IngressMetrics
from serving.messages import Output, is_terminal
from serving.openai.errors import APIError, bad_request, internal, too_many_requests, unavailable
from serving.openai.protocol import CommonRequest
from serving.text.detokenizer import Detokenizer

RETRY_AFTER_S = 1.0


@dataclass
class Sequence:
    """One choice of a response: what goes to the engine."""

    id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    priority: int
    detokenizer: Detokenizer | None  # None: token ids only


@dataclass
class Delta:
    """What some tokens added to a choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # characters of the choice before each token
    finish_reason: str | None = None
    cached_tokens: int = 0


def make_sequence(
    request: CommonRequest,
    request_id: str,
    index: int,
    prompt: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
) -> Sequence:
    detokenizer = None
    if tokenizer is not None:
        detokenizer = Detokenizer(
            tokenizer, prompt, request.stop, request.include_stop_str_in_output, request.skip_special_tokens
        )
    return Sequence(f"{request_id}-{index}", index, prompt, params, request.priority, detokenizer)


async def run(client: EngineClient, sequence: Sequence, metrics: IngressMetrics) -> AsyncGenerator[Delta, None]:
    """The deltas of one choice; the last one has a finish_reason. Raises APIError when the request fails.

    However it ends it is counted, under CANCELLED when nobody wanted the rest.
    """
    started = last = time.monotonic()
    first = True
    cached = 0
    reason = messages.CANCELLED
    stream = client.generate(sequence.id, sequence.prompt, sequence.params.to_dict(), sequence.priority)
    try:
        async with aclosing(stream) as batches:
            async for outputs in batches:
                now = time.monotonic()
                delta = _decode(sequence, outputs)
                cached = delta.cached_tokens = max(cached, delta.cached_tokens)
                if delta.token_ids:
                    if first:
                        metrics.ttft.observe(now - started)
                        first = False
                    else:
                        for _ in delta.token_ids:
                            metrics.itl.observe((now - last) / len(delta.token_ids))
                    last = now
                    metrics.tokens.inc(len(delta.token_ids))
                error = next((o for o in outputs if "error" in o), None)
                reason = delta.finish_reason or (error["error"] if error is not None else reason)
                if delta.token_ids or delta.finish_reason is not None:
                    yield delta
                if delta.finish_reason is not None:
                    return
                if error is not None:
                    raise api_error(error)
    except APIError:
        raise
    except Exception:
        reason = messages.INTERNAL
        raise
    finally:
        metrics.finished(reason, time.monotonic() - started)


def _decode(sequence: Sequence, outputs: list[Output]) -> Delta:
    """Push tokens through the detokenizer, up to a stop string."""
    delta = Delta(sequence.index, "", [])
    detokenizer = sequence.detokenizer
    for output in outputs:
        delta.cached_tokens = max(delta.cached_tokens, output.get("cached", 0))
        if "token" not in output:
            continue
        delta.token_ids.append(output["token"])
        found = output.get("logprobs")
        logprobs = TokenLogprobs(found[0], found[1], [(t, p) for t, p in found[2]]) if found else None
        delta.logprobs.append(logprobs)
        reason = output.get("finish")
        if detokenizer is not None:
            delta.offsets.append(detokenizer.length)
            # The token that ended the sequence (EOS, a stop token) is counted but not shown.
            if reason != "stop":
                delta.text += detokenizer.push(output["token"])
            if reason is not None and not detokenizer.stopped:
                delta.text += detokenizer.finish()
            if detokenizer.stopped:
                reason = "stop"
        if reason is not None:
            delta.finish_reason = reason
            break
    return delta


async def run_all(
    client: EngineClient, sequences: list[Sequence], metrics: IngressMetrics
) -> AsyncGenerator[Delta, None]:
    """The deltas of all choices of a response as they come. Raises the first APIError; closing it aborts everything."""
    stream = run(client, sequences[0], metrics) if len(sequences) == 1 else _merged(client, sequences, metrics)
    metrics.open.inc()
    try:
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta
    finally:
        metrics.open.dec()


async def _merged(
    client: EngineClient, sequences: list[Sequence], metrics: IngressMetrics
) -> AsyncGenerator[Delta, None]:
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

    async def pump(sequence: Sequence) -> None:
        try:
            async with aclosing(run(client, sequence, metrics)) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(sequence)) for sequence in sequences]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def api_error(output: Output) -> APIError:
    """The HTTP error for the kind of a terminal output."""
    assert is_terminal(output)
    message = output.get("message", "")
    match output["error"]:
        case messages.QUEUE_FULL:
            return too_many_requests(message, RETRY_AFTER_S)
        case messages.QUEUE_TIMEOUT:
            return unavailable("the request was queued for longer than max_queue_time", RETRY_AFTER_S)
        case messages.INVALID:
            return bad_request(message)
        case messages.TIMEOUT:
            return APIError(504, message, type="timeout_error", code="timeout")
        case messages.NO_ENGINE | messages.ENGINE_LOST | messages.CLOSING:
            return unavailable(message, RETRY_AFTER_S)
        case _:
            return internal()
