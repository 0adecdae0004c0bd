"""Settings of the whole suite."""

from hypothesis import HealthCheck, settings

# Times say nothing on a shared machine: no example may fail for being slow.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
