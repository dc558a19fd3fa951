"""A module beside the script, imported by the task only."""

NAME = "sibling"
