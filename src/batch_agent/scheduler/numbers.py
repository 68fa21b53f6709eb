"""The numbers by which a server is judged: one frozen value, each with the reason or the measurement that chose it.

Seconds unless the name says otherwise. The numbers of the search for requests in flight are in ``capacity``, those of
rate limits in ``rates``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Numbers:
    # Rate limits count by it, so a longer Retry-After may concern one row. Gateways and key servers restart in it. A
    # server that has answered nothing may load a model: its control requests have that time.
    minute: float = 60.0

    # How often something happens before it is taken for more than chance.
    twice: int = 2  # a row crashes servers or is refused for load; rows are denied; a full server refuses
    several: int = 3  # rows or attempts that fail, with nothing that was answered meanwhile
    # Answers that show how long one takes, requests that show what a server takes, rows that are denied with a status
    # that may concern all: a moderator may refuse a few in a row.
    learnt: int = 10
    # Agents that fill no engine, requests that may all be slow ones, answers that differ by chance, grants until an
    # agent whose context was evicted is next.
    few: int = 8
    rarely: int = 1024  # grants until the oldest turn is next, turns until streaming is tried again
    enough: int = 16  # answers, or refusals, that judge a number of requests, streaming, or the size of contexts
    moment: float = 0.25  # what arrives within it was caused together, or waited in the event loop

    # Seconds of a server that works.
    instant: float = 1e-3  # what was sent together; the shortest answer
    slack: float = 1.0  # what is on its way arrives within it: later than it left, and later still if it must connect
    # It lets a request wait no longer: in its queue, as its Retry-After, before the first byte while another server has
    # none. Longer waits are mostly those of limits per minute: a server with 16 slots that asked for 5 s was taken for
    # one that takes 16 requests per minute, and used for a fiftieth. A control request may wait as long; before the
    # server is down each may be lost, and each of several gets as many seconds more.
    busy: float = 10.0

    # Parts of a whole.
    small: float = (
        1 / 8
    )  # of a limit or of the requests that run: left to others, a short queue; of a time limit; of a cache: ours
    mostly: float = 0.5  # another turn is likely, a context is cached, an engine counts our requests

    # Speed.
    refresh: float = 1.0  # between two readings of an engine, or two looks at the contexts in it; the shortest span
    weight: float = 0.1  # of the latest answer in a mean
    forget: float = 0.99  # factor of what is known, with each answer, where a mean will not do
    much_slower: float = 2.0  # times: than another server, or than a wait was expected to be
    unseen: float = 0.1  # a smaller difference between two servers may be a delay of our own event loop

    # Trials of a server that is down. The time lost after its return stays a small share of the outage.
    first_pause: float = 0.5  # a server that restarts a worker is back in less
    # One request in 30 s disturbs no other client, however long the outage is. So old is evidence that a server is up.
    longest_pause: float = 30.0
    # Part of the outage so far: a pause of 10 s is reached after 50 minutes. A trial may take as long, or a short wait:
    # a server that starts cold answers more slowly.
    pause_share: float = 1 / 300
    denied_share: float = 1 / 20  # the same if it denies every row: a gateway that reloads takes seconds, a key hours
    limited_share: float = 1 / 3  # the same if it refuses every request: each refused request may count for its limit
    jitter: float = 0.3  # random part of a pause, so that many runs do not try together
    # A server that asks for a longer wait than this is tried again after the wait of a busy one, then twice as long, up
    # to this: one asked for a day, and answered 3 s later.
    longest_hold: float = 300.0

    # Silence: nothing at all arrives for much longer than the slowest answer took.
    shortest_silence: float = 5.0
    silence_factor: float = 6.0  # over the slowest answer
    most_doubled: int = 6  # times that the wait is doubled: for a silent server, a long hold, a row refused for load

    # Control requests.
    control_pause: float = 5.0  # between two of them that find out whether refusals for load concern rows

    # The end of patience, for a dispatcher that has one.
    never_reached: float = 30.0  # a server that was never reached: probably a wrong address

    # Denials: which rows does a 401, 403 or 404 concern?
    many_denied: int = 20  # rows with the same message and any other status

    # Refusals for load.
    # A shorter Retry-After costs less than finding out whether it concerns all rows. A row that waits no longer keeps
    # its place, and a trial may take so long.
    short_wait: float = 2.0

    # Failures that either side may have caused.
    least_trying: float = 20.0  # of failures before a row is charged because of probes alone

    # What the KV cache holds. Chosen by recordings of vLLM 0.26 and SGLang 0.5.16 on an H200.
    longest_lag: float = 20.0  # of an engine's count until it moves; vLLM's stood at 0 for 18 s after a cold start
    usual_lag: float = 8.0  # of a count that moves; vLLM's was 3 to 6 s late
    beyond: float = (
        1.2  # of the reported size; prompts are predicted to a few per cent, so a context beyond it proves more
    )
    full: float = 0.9  # part of the size below which nothing is evicted
    margin_loss: float = 0.95  # factor of the margin after an eviction that others must have caused
    margin_gain: float = 0.002  # what a hit adds to it
    learnt_loss: float = 0.8  # largest change of a learnt size after one eviction
    learnt_gain: float = 1.01  # ... and after one hit near it

    @property
    def least_refused(self) -> float:
        """The shortest time for which a row is refused, while others are accepted, before it fails: rate limits count
        by the minute."""
        return self.minute + self.control_pause


N = Numbers()
