"""Hypothesis without time limits: how long an example takes depends on the machine's load."""

from hypothesis import HealthCheck, settings

settings.register_profile("eldr", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eldr")
