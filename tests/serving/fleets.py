"""Limits and requests that tests of the fleet share: waits of hundredths of a second, and few of them."""

from typing import Any

from draftmill.serving.failures import Backoff
from draftmill.serving.limits import FleetLimits
from draftmill.serving.protocol import GREEDY, ChatRequest


def limits(**changes: Any) -> FleetLimits:
    """Patient limits with quick retries, but for `changes`."""
    usual = {
        "max_in_flight": 8,
        "max_attempts": 5,
        "max_timeouts": 2,
        "max_failures_in_row": 8,
        "connect_timeout_s": 5.0,
        "min_timeout_s": 20.0,
        "min_rate_tok_per_s": 10.0,
        "api_key": None,
        "backoff": Backoff(0.01, 0.1),
    }
    return FleetLimits(**{**usual, **changes})


def chat(text: str, max_tokens: int = 64, **fields: Any) -> ChatRequest:
    """A user's one message."""
    messages = [{"role": "user", "content": text}]
    return ChatRequest(**{"messages": messages, "max_tokens": max_tokens, "sampling": GREEDY, **fields})
