"""What comes out of each paper, and of all of them together; papers.yaml says the rest."""

from __future__ import annotations

from pydantic import BaseModel, Field


class Paper(BaseModel):
    summary: str = Field(min_length=40, max_length=160)


class Survey(BaseModel):
    survey: str = Field(min_length=80, max_length=500)


def says_something(paper: Paper) -> bool:
    return bool(paper.summary.strip())
