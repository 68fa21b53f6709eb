def latest(lines, count):
    """The last so many lines."""
    return lines[len(lines) - count - 1 :]
