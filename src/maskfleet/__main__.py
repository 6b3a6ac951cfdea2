"""`python -m maskfleet` is the command `maskfleet`."""

from maskfleet.cli.main import main

if __name__ == "__main__":
    main()
