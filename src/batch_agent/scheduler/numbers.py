"""The numbers by which a server is judged: one frozen value, each with the reason or the measurement that chose it.

Seconds unless the name says otherwise. The numbers of the search for requests in flight are in ``capacity``, those of
rate limits in ``rates``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numbers:
    # Trials of a server that is down. The time lost after its return stays a small share of the outage.
    first_pause: float = 0.5  # a server that restarts a worker is back in less
    longest_pause: float = 30.0  # one request in 30 s disturbs no other client, however long the outage is
    pause_share: float = 1 / 300  # of the outage so far: 10 s are reached after 50 minutes
    denied_share: float = 1 / 20  # the same if it denies every row: a gateway that reloads takes seconds, a key hours
    limited_share: float = 1 / 3  # the same if it refuses every request: each refused request may count for its limit
    jitter: float = 0.3  # random part of a pause, so that many runs do not try together
    # A server that asks for a longer wait than this is tried again after the first of these times, then twice as long,
    # up to this: one asked for a day, and answered 3 s later.
    longest_hold: float = 300.0
    first_hold: float = 15.0
    shortest_trial: float = 2.0  # that a trial may take
    trial_share: float = 1 / 240  # ... of the outage so far: a server that starts cold answers more slowly
    shortest_grace: float = 1.0  # for requests from before an outage, after its end

    # Silence: nothing at all arrives for much longer than the slowest answer took.
    learnt: int = 10  # good answers before the slowest of them is used
    shortest_silence: float = 5.0
    silence_factor: float = 6.0  # over the slowest answer
    most_doubled: int = 6  # times that the wait between two looks at a silent server is doubled
    few_slow: int = 8  # requests in flight that may all be of rows that take long
    second_look: float = 0.25  # after a stall of the event loop, answers that arrived are read first
    fresh: float = 30.0  # an answer or a good probe is evidence that it is up for so long

    # Control requests.
    shortest_control: float = 10.0  # a control request may wait in the server's queue
    first_answer: float = 60.0  # the same while the server has answered nothing: it may load a model
    first_controls: tuple[float, ...] = (10.0, 20.0, 30.0)  # the same before it is down: each may be lost
    control_pause: float = 5.0  # between two of them that find out whether refusals for load concern rows

    # The end of patience, for a dispatcher that has one.
    never_reached: float = 30.0  # a server that was never reached: probably a wrong address
    denied: float = 60.0  # of denials after good answers; before one, the second denial is the end

    # Denials: which rows does a 401, 403 or 404 concern?
    confirm_after: float = 0.25  # requests in flight together are denied together, by one mistake of a gateway
    confirmed: int = 2  # rows denied in such a later request, while others are in flight
    own_denials: int = 3  # denials of one row, while others were answered, that are the row's own fault
    several_denied: int = 10  # rows with a status that may concern all; a moderator may refuse a few in a row
    few_denied: int = 3  # the same before any good answer, with few requests in flight
    many_denied: int = 20  # rows with the same message and another status

    # Refusals for load.
    proven_answers: int = 20  # good answers after which a Retry-After of one request may be chance
    excessive: float = 60.0  # a Retry-After above this, after good answers, is confirmed by a second request
    short_wait: float = 2.0  # a shorter Retry-After costs less than finding out whether it concerns all rows
    # Retry-After of a server that is full; longer ones are mostly those of limits per minute. A server with 16 slots
    # that asked for 5 s was taken for one that takes 16 requests per minute, and used for a fiftieth.
    short_hold: float = 10.0
    passed_over: int = 2  # times that a row is refused while others are answered, until it counts as the cause
    least_refused: float = 65.0  # that a row is refused, alone, before it fails: rate limits count by the minute

    # Failures that either side may have caused.
    several: int = 3  # rows whose failures put a server down without a probe
    most_convicted: int = 100  # rows charged because of control requests alone, without the answer of a row
    suspect: int = 2  # hits and crashes after which a row is tried last and alone
    least_trying: float = 20.0  # of failures before a row is charged because of probes alone
    long_delay: float = 2.0  # between two attempts during which a row keeps its place

    # What the KV cache holds. Chosen by recordings of vLLM 0.26 and SGLang 0.5.16 on an H200.
    longest_lag: float = 20.0  # of an engine's count until it moves; vLLM's stood at 0 for 18 s after a cold start
    usual_lag: float = 8.0  # of a count that moves; vLLM's was 3 to 6 s late
    least_counted: int = 16  # requests of ours that an engine must have counted before their share says anything
    counted_share: float = 0.5  # of our requests; an engine that counts fewer is one of several replicas
    beyond: float = (
        1.2  # of the reported size; prompts are predicted to a few per cent, so a context beyond it proves more
    )
    larger: int = 4  # such contexts, after which the report is not believed
    full: float = 0.9  # part of the size below which nothing is evicted
    margin_loss: float = 0.95  # factor of the margin after an eviction that others must have caused
    margin_gain: float = 0.002  # what a hit adds to it
    least_margin: float = 0.3
    learnt_loss: float = 0.8  # largest change of a learnt size after one eviction
    learnt_gain: float = 1.01  # ... and after one hit near it


N = Numbers()
