"""A module that takes its time to be imported."""

import time

time.sleep(3)
