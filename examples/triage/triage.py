"""The tool and the schema that triage.yaml names."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from batch_agent import Tool

Topic = Literal["export", "login", "password", "invoice", "refund", "discount", "privacy", "mobile app"]

ARTICLES: dict[Topic, str] = {
    "export": "Exports are being repaired. Try again in an hour.",
    "login": "Sign-in is slow today. See the status page.",
    "password": "Reset mails take an hour. Look in the spam folder.",
    "invoice": "All invoices are under Settings, Billing.",
    "refund": "A refund takes five working days.",
    "discount": "Schools pay half. Write to sales.",
    "privacy": "We delete all data within 30 days.",
    "mobile app": "Update the app to 5.2: it no longer crashes.",
}


class Triage(BaseModel):
    topic: Topic
    reply: str = Field(max_length=60)
    urgent: bool


@Tool.define(cacheable=True)
def help_article(topic: Topic) -> dict[str, str]:
    """The help article about a topic.

    Args:
        topic: what the ticket is about
    """
    return {"topic": topic, "reply": ARTICLES[topic]}
