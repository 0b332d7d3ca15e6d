"""How many requests one engine gets at once: as many as bring throughput, fewer when it fails.

By Little's law an engine's throughput is requests in flight / seconds per token of each. Where the number in flight
grows and seconds per token grow as much, requests only wait in the engine's queue.
"""

START = 32
"""First level: small enough for any engine, large enough that long answers do not make the way up take hours."""
_FAST, _SLOW = 2.0, 1.1
_TOLERATED = 0.5
"""Seconds per token may grow by this share of what the number in flight grew by."""
_REST_ROUNDS = 10
"""Rounds between two tries to exceed a level that did not pay: loads change."""


class Concurrency:
    """`limit` requests at once, between 1 and `ceiling`, judged once a round of `limit` answers.

    It grows while latency per token holds: doubling up to half of the level at which the engine failed, or to the last
    one that paid, and by a tenth from there.
    """

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self.restart(0.0)

    def restart(self, now_s: float) -> None:
        """Begins anew, with an engine that came back."""
        self.limit = min(START, self.ceiling)
        self._fast_below = self.ceiling
        self._rest = 0
        self._proven: tuple[int, float] | None = None
        self._has_answered = False
        self._begin_round(now_s)

    def answered(self, sent_s: float, now_s: float, token_s: float, *, was_full: bool) -> None:
        """Notes an answer, at `token_s` seconds per token, to what was sent at `sent_s` (`was_full`: no place left)."""
        if sent_s < self._round_began_s:
            return  # sent at another level
        self._has_answered = True
        self._num_answers += 1
        self._sum_token_s += token_s
        self._num_full += was_full
        if self._num_answers >= self.limit:
            self._judge(now_s)

    def failed(self, now_s: float) -> None:
        """Halves the limit."""
        self.limit = max(1, self.limit // 2)
        if self._has_answered:  # else it is still the same trouble
            self._fast_below = self.limit
        self._has_answered = False
        self._proven = None
        self._begin_round(now_s)

    def _begin_round(self, now_s: float) -> None:
        self._round_began_s = now_s
        self._num_answers = self._num_full = 0
        self._sum_token_s = 0.0

    def _judge(self, now_s: float) -> None:
        token_s = self._sum_token_s / self._num_answers
        # Where places stayed free, the limit did not bound anything: nothing is learnt about it.
        if 2 * self._num_full >= self._num_answers:
            if self._holds(token_s):
                self._proven = (self.limit, token_s)
                self._grow()
            else:
                assert self._proven is not None
                self.limit = self._fast_below = self._proven[0]
                self._rest = _REST_ROUNDS
        self._begin_round(now_s)

    def _holds(self, token_s: float) -> bool:
        if self._proven is None or self._proven[0] >= self.limit:
            return True
        level, proven_token_s = self._proven
        return token_s <= proven_token_s * (1 + _TOLERATED * (self.limit / level - 1))

    def _grow(self) -> None:
        if self._rest > 0:
            self._rest -= 1
            return
        growth = _FAST if self.limit < self._fast_below else _SLOW
        self.limit = min(self.ceiling, max(self.limit + 1, int(self.limit * growth)))
