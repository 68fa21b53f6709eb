from __future__ import annotations

from batch_agent.backends.engines.engine import Exposition

TEXT = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\" {c} \\\\ d"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0 1700000000000
vllm:num_requests_running_more 9
plain 1e3
endless +Inf
nothing NaN
broken{a="b"}
broken{a="b"} many
"""


def test_samples_of_one_name_are_added_up_over_their_labels() -> None:
    told = Exposition(TEXT, {"vllm:num_requests_running", "plain"})
    assert told.total("vllm:num_requests_running") == 7
    assert told.mean("vllm:num_requests_running") == 3.5
    assert told.count("not there", "plain") == 1000
    assert [sample.labels["engine"] for sample in told.samples("vllm:num_requests_running")] == ["0", "1"]


def test_labels_may_hold_quotes_braces_and_backslashes() -> None:
    [first, _] = Exposition(TEXT, {"vllm:num_requests_running"}).samples("vllm:num_requests_running")
    assert first.labels["model_name"] == 'a "b" {c} \\ d'


def test_what_was_not_asked_for_cannot_be_read_or_is_no_number_is_not_there() -> None:
    told = Exposition(TEXT, {"endless", "nothing", "broken"})
    assert told.total("plain") is None
    assert [told.total(name) for name in ("endless", "nothing", "broken")] == [None, None, None]
    assert Exposition("", {"plain"}).count("plain") is None
