"""A module that reads a variable while it loads; the launcher's server preloads it."""

from __future__ import annotations

import os

READ = os.environ.get("READ_WHILE_LOADING")
