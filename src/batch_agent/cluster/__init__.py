"""One run with many processes: the feeder, the workers, and the data that they exchange."""
