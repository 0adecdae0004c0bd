"""A module of a task that needs something that is not installed."""

import missing_library  # type: ignore[import-not-found]  # noqa: F401
