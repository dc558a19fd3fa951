"""Configs of the package."""
