"""One run worked on by many processes: who feeds it, who works on it, and what travels between them."""
