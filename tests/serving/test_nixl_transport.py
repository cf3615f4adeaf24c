"""Slabs by NIXL, where it is installed: over UCX in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from serving import nixl_transport
from serving.nixl_transport import NixlTransport

BLOCKS, BYTES = 16, 1 << 14


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)
    with pytest.raises(ValueError, match=r"pip install 'ferry-serve\[nixl\]'"):
        NixlTransport("a", 0, 1, 1)


def pool(name: str, seed: int) -> tuple[np.ndarray, NixlTransport]:
    slabs = np.random.default_rng(seed).integers(0, 256, (BLOCKS, BYTES), dtype=np.uint8)
    return slabs, NixlTransport(name, slabs.ctypes.data, BLOCKS, BYTES)


def test_blocks_arrive_where_they_should_and_nowhere_else() -> None:
    pytest.importorskip("nixl._api", reason="the extra nixl is not installed")
    ours, source = pool("source", 1)
    theirs, destination = pool("destination", 2)
    before = theirs.copy()
    for _ in range(2):  # the second time the peer is known
        destination.fetch(source.pack([1, 5, 9, 7]), [3, 2, 8, 0], nixl_transport.POLL_S * 50_000)
        assert (theirs[[3, 2, 8, 0]] == ours[[1, 5, 9, 7]]).all()
    untouched = [i for i in range(BLOCKS) if i not in (3, 2, 8, 0)]
    assert (theirs[untouched] == before[untouched]).all()
