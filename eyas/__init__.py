"""Eyas prepares what an EAGLE-3 draft model is trained on: the target model's own answers, token by token."""

from eyas.plugins import hookimpl

__all__ = ["hookimpl"]
