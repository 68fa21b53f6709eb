"""Settings of Hypothesis for all tests. No test asserts a time, so a busy machine must not fail one. Tests that need
more examples than these set their own number."""

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
