"""Which prompt labels better, and how good is it? python examples/trusted_labels.py"""

import sys
from typing import Any

from batch_agent import BatchAgent

SHOWN = """You sort messages to a shop.
"Where is my box?" {"topic": "delivery", "angry": false}
"You took the money twice, thieves!" {"topic": "payment", "angry": true}
"The lamp does not light up." {"topic": "product", "angry": false}
"I forgot my password." {"topic": "account", "angry": false}
"Have a nice weekend." {"topic": "other", "angry": false}"""
PROMPTS = {
    "plain": {"task": 'Topic of this message of a customer: "{text}"'},
    "shown": {"task": '"{text}"', "system_prompt": SHOWN},
}


def main(source: str) -> None:
    common: dict[str, Any] = {
        "inputs": source,
        "output_schema": {"topic": "delivery|payment|product|account|other", "angry": "boolean"},
        "gold": {"topic": "topic", "angry": "angry"},  # columns with the right answers; the model never sees them
        "gold_sample": "random",
        "temperature": 0,
    }
    bounds = {}
    for name, prompt in PROMPTS.items():  # both prompts get the same 50 rows, a random sample of the table
        score = BatchAgent.run_sync(**prompt, **common, pilot=50, pilot_only=True).score()
        bounds[name] = score["topic"].bound or 0.0
        print(f"{name}\n{score}\n")
    best = max(bounds, key=lambda name: bounds[name])
    print(f"all rows, with {best}\n{BatchAgent.run_sync(**PROMPTS[best], **common).score()}")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["examples/trusted_labels/messages.csv"])
