"""Settings of Hypothesis for all tests: no test asserts a time, so a busy machine must not fail one."""

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
