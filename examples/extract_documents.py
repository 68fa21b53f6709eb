"""Extract fields from documents: python examples/extract_documents.py examples/data/invoices > invoices.jsonl"""

import sys
from datetime import date
from typing import Literal

from pydantic import BaseModel, Field

from batch_agent import BatchAgent


class Invoice(BaseModel):
    number: str = Field(max_length=20)
    seller: str = Field(max_length=40)
    total: float = Field(gt=0)
    currency: Literal["EUR", "USD", "GBP"]
    due: date | None


def main(folder: str) -> None:
    results = BatchAgent.run_sync(
        system_prompt="You read invoices. Copy what is written; what is not there is null.",
        task="<invoice>\n{text}\n</invoice>",
        inputs=folder,  # one row for each file: path, name, text, pages
        output_schema=Invoice,
        temperature=0,
        max_tokens=120,
    )
    for result in results:
        if result.output:
            print(result.output.model_dump_json())
        else:
            print(result.input, result.error, sep="\t", file=sys.stderr)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["examples/data/invoices"]))
