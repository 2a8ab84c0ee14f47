"""Hypothesis draws the same examples in every run, and a busy machine fails none of them."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
