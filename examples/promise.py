"""A table of which at most a tenth may be wrong: what do people still have to do? python examples/promise.py"""

import sys

from batch_agent import BatchAgent

RUN = "runs/complaints"


def main(source: str) -> None:
    results = BatchAgent.run_sync(
        task='Is the customer angry? "{text}"',
        inputs=source,
        output_schema={"angry": "boolean"},
        gold="angry",  # here only to take the labels out of the rows
        temperature=0,
        promise="angry.accuracy >= 0.9",
        truth="people",
        max_people=300,  # judgements
        prices={"people": 0.25},  # dollars for each
        run_dir=RUN,
        resume=True,  # a second start asks the model nothing again, and knows what people have judged since
    )
    promise = results.summary.promise
    assert promise is not None
    print(f"{len(results)} rows, {len(results.failed)} failed")
    for line in promise.lines(RUN):  # how it stands, what is left for people, and the command for it
        print(line)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["examples/trusted_labels/messages.csv"])
