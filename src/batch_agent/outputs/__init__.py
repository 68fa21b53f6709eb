"""A model's text → a value of the user's schema. Pure code."""
