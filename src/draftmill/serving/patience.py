"""How long an answer may take: what its longest form needs at the rate the engine was seen to have, with slack.

A limit below what a full-length thinking answer needs would cancel healthy work and send it again, for ever
(UKGovernmentBEIS/inspect_ai#3558).
"""

SLACK = 4.0
"""Over the slowest rate seen lately: prompts grow longer, and engines busier."""
_FORGET = 0.02
_FEWEST_TOKENS = 16
"""A shorter answer's time is mostly its prompt's."""


class Patience:
    """Timeouts of one endpoint. `min_rate_tok_per_s` is assumed until an answer was seen."""

    def __init__(self, min_timeout_s: float, min_rate_tok_per_s: float) -> None:
        self._min_timeout_s = min_timeout_s
        self._allowed_token_s = 1.0 / min_rate_tok_per_s
        self._slow_token_s = 0.0

    def timeout_s(self, max_tokens: int, num_timeouts: int) -> float:
        """Seconds for a request that may write `max_tokens`, twice as many after each of its own timeouts."""
        return max(self._min_timeout_s, max_tokens * self._allowed_token_s) * 2.0**num_timeouts

    def observed(self, seconds: float, num_tokens: int) -> float:
        """Notes an answer; returns its seconds per token. Slower ones count at once, faster ones little by little."""
        token_s = seconds / max(num_tokens, _FEWEST_TOKENS)
        self._slow_token_s = max(token_s, self._slow_token_s + _FORGET * (token_s - self._slow_token_s))
        self._allowed_token_s = SLACK * self._slow_token_s
        return token_s
