"""The version, which the build reads from here: so it is known in a source tree that was never installed."""

__version__ = "1.0.0rc1"
