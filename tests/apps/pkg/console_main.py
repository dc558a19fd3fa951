"""The same app, started with `python -m pkg.console_main`."""

from .console import main

if __name__ == "__main__":
    main()
