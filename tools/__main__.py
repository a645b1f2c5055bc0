"""`python -m subquad.tools NAME ...`."""
from .common.cli import main

main()
