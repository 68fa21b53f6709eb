"""How good the answers are: samples, intervals, gold, scores and comparisons. Pure, on the standard library."""
