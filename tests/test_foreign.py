from batch_agent.foreign import describe, message_of


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


def test_an_exception_is_described_without_its_traceback() -> None:
    assert describe(ValueError("bad")) == "ValueError: bad"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 100_000))) < 5000


def test_an_exception_that_cannot_say_what_it_is_is_named() -> None:
    assert (message_of(Unspeakable()), describe(Unspeakable())) == ("", "Unspeakable")


def test_a_description_can_be_sent() -> None:
    assert describe(OSError("no \udcff here")).encode() == b"OSError: no ? here"
