"""API errors cross processes as they are."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import pytest

from serving.openai.errors import (
    APIError,
    bad_request,
    internal,
    not_found_model,
    too_many_requests,
    unavailable,
)

ERRORS = [
    bad_request("x is 1, must be 2", "x", "wrong"),
    not_found_model("a", ["b"]),
    too_many_requests("full", 2.5),
    unavailable("starting", 1.0),
    internal(),
    APIError(504, "late " * 500, type="timeout_error", code="timeout"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error.status))
def test_an_error_survives_pickling(error: APIError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), cloudpickle.loads(cloudpickle.dumps(error)), copy.copy(error)):
        assert type(again) is APIError and str(again) == str(error)
        assert (again.status, again.headers, again.body()) == (error.status, error.headers, error.body())
