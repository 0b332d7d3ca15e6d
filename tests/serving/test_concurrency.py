"""The number of requests an engine gets grows while that brings throughput, and halves when it fails."""

from collections.abc import Callable

from draftmill.serving.concurrency import START, Concurrency


def run(concurrency: Concurrency, num_rounds: int, token_s: Callable[[int], float], now_s: float = 1.0) -> list[int]:
    """The limit after each round of an engine that takes `token_s(in flight)` seconds a token, always full."""
    levels = []
    for _ in range(num_rounds):
        level, sent_s, now_s = concurrency.limit, now_s + 1, now_s + 2
        for _ in range(level):
            concurrency.answered(sent_s, now_s, token_s(level), was_full=True)
        levels.append(concurrency.limit)
    return levels


def test_it_doubles_to_the_ceiling_where_latency_per_token_holds() -> None:
    assert run(Concurrency(200), 4, lambda _: 1.0) == [64, 128, 200, 200]


def test_it_goes_on_where_latency_grows_less_than_throughput() -> None:
    # As a GPU that reads its weights once for the whole batch.
    assert run(Concurrency(256), 4, lambda level: 1 + level / 160)[-1] == 256


def test_it_stays_where_more_requests_only_wait() -> None:
    levels = run(Concurrency(1024), 40, lambda level: max(1.0, level / 70))
    assert levels[:3] == [64, 128, 64]
    assert set(levels[3:]) == {64, 70, 77}, "it tries again from time to time, by a tenth"


def test_a_small_ceiling_is_where_it_starts() -> None:
    assert Concurrency(3).limit == 3
    assert Concurrency(1000).limit == START


def test_a_failure_halves_it_down_to_one() -> None:
    concurrency = Concurrency(100)
    levels = []
    for now_s in range(7):
        concurrency.failed(float(now_s))
        levels.append(concurrency.limit)
    assert levels == [16, 8, 4, 2, 1, 1, 1]


def test_after_failures_in_a_row_it_doubles_to_half_of_where_they_began_and_then_creeps() -> None:
    concurrency = Concurrency(1000)
    assert run(concurrency, 3, lambda _: 1.0) == [64, 128, 256]
    concurrency.answered(1e3, 1e3, 1.0, was_full=True)
    for now_s in (1e3, 1e3 + 1, 1e3 + 2):
        concurrency.failed(now_s)
    assert concurrency.limit == 32
    assert run(concurrency, 4, lambda _: 1.0, now_s=2e3) == [64, 128, 140, 154]


def test_places_that_stay_free_teach_nothing() -> None:
    concurrency = Concurrency(100)
    for _ in range(500):
        concurrency.answered(1.0, 2.0, 1.0, was_full=False)
    assert concurrency.limit == START


def test_answers_sent_at_another_level_do_not_count() -> None:
    concurrency = Concurrency(100)
    run(concurrency, 1, lambda _: 1.0, now_s=1.0)
    for _ in range(500):
        concurrency.answered(2.0, 50.0, 9.0, was_full=True)
    assert concurrency.limit == 64


def test_it_begins_anew_with_an_engine_that_came_back() -> None:
    concurrency = Concurrency(100)
    for now_s in range(7):
        concurrency.failed(float(now_s))
    concurrency.restart(10.0)
    assert run(concurrency, 2, lambda _: 1.0, now_s=10.0) == [64, 100]
