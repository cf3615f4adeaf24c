"""Cluster policies and protocols: pure functions and state machines."""
