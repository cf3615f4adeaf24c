"""What an engine keeps for its ingresses, and for how long."""

from __future__ import annotations

from typing import Any

from serving.messages import LEASE
from serving.outbox import Outboxes

LEASE_S = 5.0


def token(request_id: str, index: int, epoch: tuple[int, int] = (0, 0), **rest: Any) -> dict[str, Any]:
    return {"id": request_id, "epoch": list(epoch), "index": index, "token": 10 + index, **rest}


def outboxes(*requests: str) -> Outboxes:
    made = Outboxes(LEASE_S, forget_s=60.0)
    for request_id in requests:
        made.opened("i", request_id, [0, 0], 0.0)
    return made


def indices(outputs: list[dict[str, Any]]) -> list[int]:
    return [output["index"] for output in outputs]


def test_outputs_are_taken_once_and_in_order() -> None:
    boxes = outboxes("a", "b")
    boxes.push("i", [token("a", 0), token("b", 0)], 0.0)
    boxes.push("i", [token("a", 1)], 0.0)
    assert [(o["id"], o["index"]) for o in boxes.take("i")] == [("a", 0), ("b", 0), ("a", 1)]
    assert boxes.take("i") == []


def test_strangers_get_nothing() -> None:
    boxes = outboxes("a")
    boxes.push("nobody", [token("a", 0)], 0.0)
    boxes.push("i", [token("unknown", 0)], 0.0)
    boxes.closed("nobody", "a", 0.0)
    assert boxes.take("nobody") == [] and boxes.take("i") == []


def test_after_the_terminal_output_nothing_more_comes() -> None:
    boxes = outboxes("a")
    boxes.push("i", [token("a", 0, finish="stop"), token("a", 1)], 0.0)
    boxes.push("i", [token("a", 2)], 0.0)
    assert indices(boxes.take("i")) == [0]
    assert boxes.clients["i"].open == {}


def test_a_closed_request_produces_nothing_more() -> None:
    boxes = outboxes("a")
    boxes.closed("i", "a", 0.0)
    boxes.push("i", [token("a", 0)], 0.0)
    assert boxes.take("i") == [] and boxes.replay("i", {"a": 0}, 0.0) == []


def test_replay_gives_everything_from_an_index_on_however_often() -> None:
    boxes = outboxes("a")
    boxes.push("i", [token("a", n) for n in range(4)], 0.0)
    boxes.take("i")
    assert indices(boxes.replay("i", {"a": 2}, 0.0)) == [2, 3]
    assert indices(boxes.replay("i", {"a": 2, "unknown": 0}, 0.0)) == [2, 3]


def test_replay_after_the_end_still_has_the_terminal_output() -> None:
    boxes = outboxes("a", "b")
    boxes.push("i", [token("a", 0), token("a", 1, finish="length")], 0.0)
    boxes.push("i", [{"id": "b", "epoch": [0, 0], "index": -1, "error": "invalid", "message": ""}], 0.0)
    assert indices(boxes.replay("i", {"a": 1}, 0.0)) == [1]
    assert indices(boxes.replay("i", {"b": 3}, 0.0)) == [-1], "an error has no index, it is always repeated"


def test_acknowledged_outputs_are_dropped() -> None:
    boxes = outboxes("a")
    boxes.push("i", [token("a", n) for n in range(4)], 0.0)
    assert boxes.acknowledge("i", {"a": 3}, 1.0) == []
    assert indices(boxes.replay("i", {"a": 0}, 1.0)) == [3]


def test_the_acknowledgement_names_what_is_expected_in_vain() -> None:
    boxes = outboxes("a")
    assert boxes.acknowledge("i", {"a": 0, "gone": 4}, 1.0) == ["gone"]
    assert boxes.acknowledge("newcomer", {"x": 0}, 1.0) == ["x"]


def test_an_ended_request_is_kept_until_its_ingress_has_the_end() -> None:
    boxes = outboxes("a")
    boxes.push("i", [token("a", 0, finish="stop")], 0.0)
    boxes.take("i")
    assert boxes.acknowledge("i", {"a": 0}, 4.0) == [] and boxes.take("i") == []
    assert boxes.acknowledge("i", {"a": 0}, 20.0) == []
    assert indices(boxes.take("i")) == [0], "a stream that broke may have lost it"
    assert boxes.acknowledge("i", {"a": 0}, 21.0) == [] and boxes.take("i") == []
    assert indices(boxes.replay("i", {"a": 0}, 21.0)) == [0]
    assert boxes.acknowledge("i", {}, 27.0) == []
    assert boxes.clients["i"].history == {}


def test_an_ended_request_survives_an_acknowledgement_that_overtook_its_submission() -> None:
    boxes = outboxes()
    boxes.opened("i", "a", [0, 0], 10.0)
    boxes.push("i", [token("a", 0, finish="stop")], 10.0)
    boxes.acknowledge("i", {}, 10.1)
    assert indices(boxes.replay("i", {"a": 0}, 10.2)) == [0]


def test_a_resubmitted_request_starts_anew() -> None:
    boxes = outboxes("a")
    boxes.push("i", [token("a", 0), token("a", 1, finish="stop")], 0.0)
    boxes.take("i")
    boxes.opened("i", "a", [1, 0], 1.0)
    boxes.push("i", [token("a", 1, (1, 0))], 1.0)
    assert [o["epoch"] for o in boxes.replay("i", {"a": 0}, 1.0)] == [[1, 0]]
    assert boxes.clients["i"].ended == {}


def test_late_outputs_of_an_older_life_neither_show_nor_end_the_newer_one() -> None:
    boxes = outboxes("a")
    boxes.opened("i", "a", [1, 0], 1.0)
    boxes.push("i", [token("a", 7, (0, 0), finish="length")], 1.0)
    assert boxes.take("i") == []
    boxes.push("i", [token("a", 3, (1, 0)), token("a", 4, (1, 2))], 1.0)
    assert indices(boxes.take("i")) == [3, 4]


def test_a_submission_that_was_overtaken_by_a_newer_one_changes_nothing() -> None:
    boxes = outboxes()
    boxes.opened("i", "a", [1, 0], 1.0)
    boxes.push("i", [token("a", 0, (1, 0))], 1.0)
    boxes.opened("i", "a", [0, 0], 1.0)
    boxes.push("i", [{"id": "a", "epoch": [0, 0], "index": -1, "error": "invalid", "message": ""}], 1.0)
    boxes.push("i", [token("a", 1, (1, 0))], 1.0)
    assert indices(boxes.take("i")) == [0, 1]


def test_a_silent_ingress_loses_its_requests_once_with_a_typed_error() -> None:
    boxes = outboxes("a", "b")
    boxes.push("i", [token("b", 0, finish="stop")], 0.0)
    assert boxes.expire(LEASE_S) == []
    assert boxes.expire(LEASE_S + 0.1) == [("a", [0, 0])]
    assert boxes.expire(LEASE_S + 0.2) == []
    assert [(o["id"], o.get("error")) for o in boxes.take("i")] == [("b", None), ("a", LEASE)]
    assert boxes.take("i") == []


def test_every_sign_of_life_renews_the_lease() -> None:
    for sign in (
        lambda boxes: boxes.acknowledge("i", {"a": 0}, 4.0),
        lambda boxes: boxes.replay("i", {}, 4.0),
        lambda boxes: boxes.opened("i", "b", [0, 0], 4.0),
        lambda boxes: boxes.seen("i", 4.0),
    ):
        boxes = outboxes("a")
        sign(boxes)
        assert boxes.expire(8.0) == []
        assert ("a", [0, 0]) in boxes.expire(9.1)


def test_an_ingress_that_comes_back_can_expire_again() -> None:
    boxes = outboxes("a")
    boxes.expire(6.0)
    boxes.opened("i", "b", [0, 0], 10.0)
    assert boxes.expire(14.0) == []
    assert boxes.expire(15.1) == [("b", [0, 0])]


def test_a_dead_ingress_is_forgotten() -> None:
    boxes = outboxes("a")
    boxes.expire(6.0)
    assert "i" in boxes.clients
    boxes.expire(61.0)
    assert boxes.clients == {}
    assert boxes.acknowledge("i", {"a": 0}, 70.0) == ["a"]


def test_an_ingress_is_not_forgotten_before_its_lease_is_over() -> None:
    boxes = Outboxes(lease_s=5.0, forget_s=1.0)
    boxes.opened("i", "a", [0, 0], 0.0)
    boxes.expire(3.0)
    assert "i" in boxes.clients


def test_a_submission_that_comes_twice_changes_nothing() -> None:
    boxes = outboxes("a")
    boxes.push("i", [token("a", 0)], 0.0)
    assert not boxes.opened("i", "a", [0, 0], 1.0)
    assert indices(boxes.replay("i", {"a": 0}, 1.0)) == [0]
    boxes.push("i", [token("a", 1, finish="stop")], 1.0)
    assert not boxes.opened("i", "a", [0, 0], 2.0)
    assert boxes.clients["i"].open == {}
    boxes.closed("i", "a", 2.0)
    assert not boxes.opened("i", "a", [0, 0], 3.0)
    assert boxes.opened("i", "a", [1, 0], 3.0) and boxes.clients["i"].open == {"a": [1, 0]}


def test_the_epoch_of_a_closed_request_is_forgotten_after_a_lease() -> None:
    boxes = outboxes("a", "b")
    boxes.closed("i", "a", 1.0)
    boxes.seen("i", 1.0 + LEASE_S)
    boxes.expire(1.0 + LEASE_S)
    assert boxes.clients["i"].newest == {"a": [0, 0], "b": [0, 0]}
    boxes.expire(1.1 + LEASE_S)
    assert boxes.clients["i"].newest == {"b": [0, 0]} and boxes.clients["i"].closed == {}


def test_an_older_life_is_not_what_an_ingress_expects() -> None:
    """It was to be started again here, and the message was lost."""
    boxes = outboxes("a")
    boxes.push("i", [{"id": "a", "epoch": [0, 1], "index": 0, "moved": "elsewhere"}], 0.0)
    boxes.take("i")
    assert boxes.acknowledge("i", {"a": 0}, 10.0, {"a": [1, 1]}) == ["a"]
    assert boxes.take("i") == []  # nor is its end repeated
    assert boxes.acknowledge("i", {"a": 0}, 10.0, {"a": [0, 0]}) == []
    assert indices(boxes.take("i")) == [0]


def test_outputs_that_nobody_takes_are_noticed() -> None:
    boxes = outboxes("a")
    assert boxes.untaken_s("i", 50.0) == boxes.untaken_s("nobody", 50.0) == 0.0
    boxes.push("i", [token("a", 0)], 1.0)
    boxes.push("i", [token("a", 1)], 3.0)
    assert boxes.untaken_s("i", 4.0) == 3.0
    boxes.take("i")
    assert boxes.untaken_s("i", 5.0) == 0.0
    boxes.push("i", [token("a", 2)], 6.0)
    assert boxes.untaken_s("i", 6.5) == 0.5
