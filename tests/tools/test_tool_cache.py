from batch_agent.tools.execution import ResultCache


def test_a_result_is_kept_until_its_time_is_over() -> None:
    cache = ResultCache()
    cache.put(("t", "a"), "text", now=0.0, ttl=10.0)
    assert cache.get(("t", "a"), 9.9) == "text"
    assert cache.get(("t", "a"), 10.0) is None
    assert len(cache) == 0


def test_without_a_time_a_result_is_kept_for_the_run() -> None:
    cache = ResultCache()
    cache.put(("t", "a"), "", now=0.0, ttl=None)
    assert cache.get(("t", "a"), 1e9) == ""


def test_the_least_recently_used_leaves_first() -> None:
    cache = ResultCache(max_bytes=3000)
    for name in "abc":
        cache.put(("t", name), "x" * 600, now=0.0, ttl=None)
    cache.get(("t", "a"), 0.0)
    cache.put(("t", "d"), "x" * 600, now=0.0, ttl=None)
    assert [name for name in "abcd" if cache.get(("t", name), 0.0) is not None] == ["a", "c", "d"]


def test_replacing_an_entry_does_not_count_it_twice() -> None:
    cache = ResultCache(max_bytes=2000)
    for _ in range(10):
        cache.put(("t", "a"), "x" * 600, now=0.0, ttl=None)
    cache.put(("t", "b"), "x" * 600, now=0.0, ttl=None)
    assert len(cache) == 2


def test_a_result_larger_than_the_cache_is_not_kept_and_pushes_nothing_out() -> None:
    cache = ResultCache(max_bytes=1000)
    cache.put(("t", "small"), "x", now=0.0, ttl=None)
    cache.put(("t", "large"), "ä" * 900, now=0.0, ttl=None)
    assert cache.get(("t", "small"), 0.0) == "x"
    assert cache.get(("t", "large"), 0.0) is None
