"""A user's module that cannot be imported."""

raise RuntimeError("no device of that kind")
