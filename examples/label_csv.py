"""Label a CSV: python examples/label_csv.py examples/data/reviews.csv labelled.csv"""

import csv
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from batch_agent import BatchAgent


class Label(BaseModel):
    mood: Literal["positive", "neutral", "negative"]
    about: str = Field(max_length=40)


def main(source: str, target: str) -> None:
    with Path(source).open(newline="") as file:
        rows = list(csv.DictReader(file))
    results = BatchAgent.run_sync(
        system_prompt="You sort reviews of a shop: how the customer feels, and what about, in a few words.",
        task="A review with {stars} of 5 stars: {text}",
        inputs=rows,
        output_schema=Label,
        max_tokens=80,
    )
    with Path(target).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*rows[0], "mood", "about"])
        for row, result in zip(rows, results, strict=True):
            label = result.output
            writer.writerow([*row.values(), *([label.mood, label.about] if label else ["failed", result.error])])
    print(Counter(result.output.mood if result.output else "failed" for result in results), "in", target)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["examples/data/reviews.csv", "labelled.csv"]))
