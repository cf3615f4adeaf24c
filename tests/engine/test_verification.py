"""Moved and resumed requests run again in idle time: what is wrong is found, and nobody else notices."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine import verification
from engine.engine import Engine
from engine.event import Event
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.step import Sampled, StepPlan, StepResult
from engine.verification import sampled
from tests.fakes import VOCAB, FakeExecutor, continuation, executor_of, extend_chain, make_engine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
PARAMS = SamplingParams(max_tokens=8)


def finished(engine: Engine, name: str = "a", prompt: list[int] = PROMPT, output: tuple[int, ...] = ()) -> Request:
    """A request that has run to its end, offered to the verifier as a resumed one would be."""
    request = engine.add_request(name, prompt, PARAMS, epoch=(1, 0), output=output)
    while engine.has_work:
        engine.step()
    engine.verifier.offer(request)
    return request


def verify(engine: Engine, steps: int = 1000) -> int:
    """Let idle time pass; returns the steps it was used for."""
    for taken in range(steps):
        if not engine.verifier.has_work:
            return taken
        engine.verifier.step()
        engine.scheduler.check()
    return steps


def lie_once(engine: Engine, name: str, index: int) -> int:
    """The executor samples one wrong token and goes on from it; returns that token."""
    executor = executor_of(engine)
    right = continuation(PROMPT, PARAMS)[0][index]
    wrong = (right + 1) % VOCAB
    execute = executor.execute
    seen = 0

    def lying(plan: StepPlan) -> StepResult:
        nonlocal seen
        result = execute(plan)
        for i, found in enumerate(result.sampled):
            if found.id == name:
                if seen == index:
                    result.sampled[i] = Sampled(name, wrong)
                    sequence = executor.sequences[name]
                    sequence.tokens[-1] = wrong
                    sequence.chain.pop()
                    extend_chain(sequence.chain, sequence.tokens)
                seen += 1
        return result

    executor.execute = lying  # type: ignore[method-assign]
    return wrong


def counts(engine: Engine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.verified, stats.verify_mismatches, stats.verify_skipped


# What is found


def test_a_request_as_it_should_be_is_verified_and_leaves_nothing() -> None:
    engine = make_engine()
    finished(engine)
    assert verify(engine) == 8
    assert counts(engine) == (1, 0, 0)
    assert engine.scheduler.pool.available == 16
    engine.add_request("next", [1, 2], PARAMS)
    while engine.has_work:
        engine.step()
    assert not executor_of(engine).sequences.keys() - {"next"}


@pytest.mark.parametrize("index", [0, 3, 7])
def test_one_wrong_token_is_found_and_told(index: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    wrong = lie_once(engine, "a", index)
    right = continuation(PROMPT, PARAMS)[0][index]
    request = finished(engine)
    assert request.output[index] == wrong
    with caplog.at_level(logging.ERROR, "ferry.engine"):
        assert verify(engine) == index + 1, "the first token that differs says it all"
    assert counts(engine) == (1, 1, 0)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == (
        f"request a differs from its undisturbed run at token {index}: it had {wrong}, undisturbed it has {right}"
    )
    assert engine.scheduler.pool.available == 16


def test_tokens_from_before_a_resume_are_compared_too() -> None:
    expected = continuation(PROMPT, PARAMS)[0]
    for given, mismatches in ((expected[:4], 0), ([*expected[:3], (expected[3] + 1) % VOCAB], 1)):
        engine = make_engine()
        finished(engine, output=tuple(given))
        verify(engine)
        assert counts(engine) == (1, mismatches, 0)


def test_wrong_kv_in_the_cache_does_not_confirm_itself() -> None:
    """The moved blocks are still there under the hashes of the right tokens; a second look at them would agree."""
    engine = make_engine()
    finished(engine)
    pool = engine.scheduler.pool
    assert pool.cached == 4
    hits = [block for block, _ in pool.find(*_chain(engine, [*PROMPT, *continuation(PROMPT, PARAMS)[0]]))]
    engine.verifier.step()
    assert not set(hits) & set(engine.scheduler.lent)
    start = executor_of(engine).plans[-1].work[0]
    assert (start.start, start.count) == (0, len(PROMPT)), "from the first position on"
    verify(engine)
    assert pool.cached == 4, "and it leaves none behind"


def _chain(engine: Engine, tokens: list[int]) -> tuple[list[bytes], list[int]]:
    return engine.scheduler._chain("", tokens, []), tokens


def test_long_prompts_run_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "CHUNK", 4)
    engine = make_engine()
    finished(engine)
    verify(engine)
    assert max(plan.num_tokens for plan in executor_of(engine).plans[8:]) == 4
    assert counts(engine) == (1, 0, 0)


def test_blocks_it_pushes_out_of_the_cache_are_kept_on_the_host() -> None:
    engine = make_engine(num_blocks=6, host_slots=32, keep_evicted=True)
    finished(engine)
    verify(engine)
    out = [copy for plan in executor_of(engine).plans[8:] for copy in plan.swap_out]
    assert len(out) == 3
    request = engine.add_request("b", PROMPT, PARAMS)
    while engine.has_work:
        engine.step()
    assert request.cached_tokens == 8 and request.output == continuation(PROMPT, PARAMS)[0]


# Who does not notice


def test_it_is_in_no_number_and_no_list() -> None:
    engine = make_engine()
    finished(engine)
    before = engine.stats()
    engine.verifier.step()
    assert engine.stats() == before and engine.scheduler.lent
    assert not engine.has_work and not engine.scheduler.requests
    assert not engine.scheduler.running and not engine.scheduler.waiting


def arrive(engine: Engine) -> None:
    engine.add_request("b", [1] * 40, PARAMS)


def promise(engine: Engine) -> None:
    engine.reserve("b", 16)


def move_in(engine: Engine) -> None:
    source = make_engine()
    source.add_request("b", [1] * 40, PARAMS)
    engine.adopt(source.hold("b"), (0, 1))


@pytest.mark.parametrize("come", [arrive, promise, move_in])
def test_whoever_comes_finds_the_engine_empty(come: Any) -> None:
    engine = make_engine()
    finished(engine)
    for _ in range(3):
        engine.verifier.step()
    come(engine)
    assert not engine.scheduler.lent and not engine.verifier.has_work
    engine.scheduler.check()
    events: list[Event] = []
    while engine.scheduler.requests:
        events += engine.step()
        assert not engine.verifier.running
    if come is not promise:
        assert [e.token for e in events] == continuation([1] * 40, PARAMS)[0]
    engine.cancel_reservation("b")
    verify(engine)
    assert counts(engine) == (1, 0, 0), "it began anew when they had gone"


def test_what_is_held_or_promised_is_no_idle_time() -> None:
    engine = make_engine()
    finished(engine)
    engine.reserve("x", 1)
    assert not engine.verifier.has_work
    engine.cancel_reservation("x")
    assert engine.verifier.has_work
    engine.add_request("b", [1], PARAMS)
    engine.hold("b")
    assert not engine.has_work and not engine.verifier.has_work


def test_a_run_that_is_always_interrupted_is_given_up() -> None:
    engine = make_engine()
    finished(engine)
    for attempt in range(verification.ATTEMPTS):
        assert engine.verifier.has_work, attempt
        engine.verifier.step()
        arrive(engine)
        while engine.has_work:
            engine.step()
    assert not engine.verifier.has_work
    assert counts(engine) == (0, 0, 1)


def test_the_queue_is_bounded_and_what_finds_no_room_is_counted() -> None:
    engine = make_engine()
    request = finished(engine)
    for _ in range(verification.MOST_QUEUED):
        engine.verifier.offer(request)
    verify(engine)
    assert counts(engine) == (verification.MOST_QUEUED, 0, 1)


# The sample


def test_the_sample_is_the_same_everywhere_and_has_the_share() -> None:
    ids = [f"chatcmpl-{i}-0" for i in range(20_000)]
    chosen = [i for i in ids if sampled(i, 0.01)]
    assert 150 < len(chosen) < 250
    assert chosen[:3] == ["chatcmpl-185-0", "chatcmpl-190-0", "chatcmpl-191-0"]
    assert set(chosen) < {i for i in ids if sampled(i, 0.1)}
    assert all(sampled(i, 1.0) for i in ids) and not any(sampled(i, 0.0) for i in ids)


def test_the_executor_of_these_tests_would_notice_foreign_blocks() -> None:
    """Else the tests above prove little."""
    engine = make_engine()
    finished(engine)
    engine.verifier.step()
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    executor.kv[engine.scheduler.lent[0]][0] += 1
    with pytest.raises(AssertionError, match="wrong KV"):
        verify(engine)
