"""Hypothesis without time limits, since a machine's load decides how long an example takes, and
with the same examples every time: what fails here must be what a change broke.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "eldr", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("eldr")
