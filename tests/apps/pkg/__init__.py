"""A package that tests start."""
