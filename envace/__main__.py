"""`python -m envace`."""

from envace.cli import main

main()
