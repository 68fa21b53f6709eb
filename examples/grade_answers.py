"""Grade answers with a judge model: JUDGE=vllm://gpu-2:8000 python examples/grade_answers.py answers.csv"""

import os
import sys
from typing import Literal

from pydantic import BaseModel, Field

from batch_agent import BatchAgent
from batch_agent.files import read_inputs


class Grade(BaseModel):
    reason: str = Field(max_length=60)  # first: a model that has given its reason grades better
    grade: Literal["right", "partly", "wrong"]


def main(path: str) -> None:
    results = BatchAgent.run_sync(
        system_prompt="You grade answers. Only the reference counts, not what you know or how the answer is worded.",
        task="Question: {question}\nReference: {reference}\nAnswer: {answer}",
        inputs=read_inputs(path),
        output_schema=Grade,
        temperature=0,
        max_tokens=100,
        backend=os.environ.get("JUDGE"),
        cache=True,  # an answer that was graded before costs nothing
    )
    grades = [result.output.grade for result in results if result.output]
    for result in results:
        print(result.job_id, result.output or result.error)
    print(f"{grades.count('right')} of {len(grades)} right, {len(results) - len(grades)} not graded")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["examples/data/answers.csv"]))
