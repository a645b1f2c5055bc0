"""`python -m subquad NAME ...` runs a command, as `subquad NAME ...` does."""
from subquad.tools.common.cli import main

main()
