"""Offline generation: `LLM(model=...).generate(prompts, params)`, no Ray, no server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from engine.config import SERVICE_GROUPS, ConfigError, resolve
from engine.sampling.params import SamplingParams
from engine.scheduler import Event
from engine.step import TokenLogprobs
from engine.values import shown

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class Logprob:
    """Raw log-softmax of the model; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None  # per token: the sampled one and the alternatives asked for
    finish_reason: str | None = None  # "stop" or "length"


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = False


class LLM:
    """An engine with its tokenizer, for scripts.

    `options` are the engine's parameters by any of their names (`docs/parameters.md`). Raises ConfigError, with one
    line, for a parameter that is unknown, wrong, not built yet, or one of the service around engines.
    """

    def __init__(self, model: str, **options: Any):
        from engine.build import build_engine
        from engine.source import resolve_model
        from engine.text.tokenizer import Tokenizer, load_tokenizer

        _check_offline(options)
        self.config = resolve({"model": model, **options})
        # A script has no impatient clients: its prompts may queue for as long as it takes.
        self.engine = build_engine(replace(self.config, max_queue_time=2**31 - 1))
        self.tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(resolve_model(self.config.model))
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts: text, lists of token ids, or {"prompt_token_ids": [...]}; results in the prompts' order.

        Raises ValueError, before anything runs, for a prompt that is empty or too long.
        """
        given: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        one = SamplingParams() if params is None else params
        each = list(one) if isinstance(one, Sequence) else [one] * len(given)
        if len(each) != len(given):
            raise ValueError(f"{len(each)} SamplingParams for {len(given)} prompts")
        for wanted in each:
            if not isinstance(wanted, SamplingParams):
                raise ValueError(f"params is {shown(wanted)}, must be SamplingParams, or one for each prompt")
        encoded = [self._encode(prompt) for prompt in given]
        outputs = [RequestOutput(f"cmpl-{next(self._ids)}", text, ids, [CompletionOutput()]) for text, ids in encoded]
        self._run(outputs, each, use_tqdm)
        if self.tokenizer is not None:
            for output in outputs:
                self._decode(output.outputs[0])
        return outputs

    def _run(self, outputs: list[RequestOutput], params: list[SamplingParams], use_tqdm: bool) -> None:
        by_id = {output.request_id: output for output in outputs}
        limit = self.engine.scheduler.max_length
        for output in outputs:
            if not 0 < len(output.prompt_token_ids) < limit:
                raise ValueError(f"a prompt has {len(output.prompt_token_ids)} tokens, must be in [1, {limit - 1}]")
        todo = list(zip(outputs, params, strict=True))[::-1]
        left = len(outputs)
        progress = None
        if use_tqdm:
            from tqdm import tqdm

            progress = tqdm(total=left, unit="prompt")
        try:
            while left:
                # The queue is bounded for servers; a script's prompts wait here instead.
                while todo and not self.engine.scheduler.queue_full:
                    output, wanted = todo.pop()
                    self.engine.add_request(output.request_id, output.prompt_token_ids, wanted)
                for event in self.engine.step():
                    done = self._take(by_id[event.request.id], event)
                    left -= done
                    if progress is not None and done:
                        progress.update()
        finally:
            for output in outputs:  # an error or Ctrl-C leaves nothing behind
                self.engine.abort(output.request_id)
            if progress is not None:
                progress.close()

    def _take(self, output: RequestOutput, event: Event) -> bool:
        completion = output.outputs[0]
        if event.error is not None:
            raise RuntimeError(f"request {output.request_id} ended: {event.error}")
        assert event.token is not None
        completion.token_ids.append(event.token)
        if event.logprobs is not None:
            completion.logprobs = completion.logprobs or []
            completion.logprobs.append(_logprobs(event.token, event.logprobs))
        if event.finish_reason is None:
            return False
        completion.finish_reason = event.finish_reason
        output.num_cached_tokens = event.request.cached_tokens
        output.finished = True
        return True

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            return None, list(prompt["prompt_token_ids"])
        if not isinstance(prompt, str):
            return None, list(prompt)
        if self.tokenizer is None:
            raise ValueError("skip_tokenizer_init is set: prompts must be token ids")
        return prompt, self.tokenizer.encode(prompt)

    def _decode(self, completion: CompletionOutput) -> None:
        assert self.tokenizer is not None
        completion.text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        for step in completion.logprobs or []:
            for token, entry in step.items():
                entry.decoded_token = self.tokenizer.decode([token], skip_special_tokens=False)


def _check_offline(options: Mapping[str, Any]) -> None:
    from engine.options.option import canonical
    from engine.options.resolution import lookup

    for name, value in options.items():
        if value is not None and lookup(name)[0].group in SERVICE_GROUPS:
            raise ConfigError(
                f"--{canonical(name)} is a parameter of services and does nothing here: give it to ferry serve"
            )


def _logprobs(token: int, found: TokenLogprobs) -> dict[int, Logprob]:
    entries = {token: Logprob(found.logprob, found.rank)}
    for rank, (other, value) in enumerate(found.top, 1):
        entries.setdefault(other, Logprob(value, rank))
    return entries


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))
