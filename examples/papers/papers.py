"""What comes out of each paper, and of all of them together; papers.yaml says the rest."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Paper(BaseModel):
    method: str = Field(max_length=80)
    finding: str = Field(max_length=160)


class Survey(BaseModel):
    themes: list[str] = Field(min_length=1, max_length=3)
    text: str = Field(max_length=500)


def says_something(paper: Paper) -> bool:
    return bool(paper.finding.strip())
