"""The others: each is run as a process of its own, in the environment that ``environments`` made for it."""
