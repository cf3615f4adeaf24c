"""Decisions as pure functions of the view."""
