"""`python -m subquad.tools NAME ...`."""
from .cli import main

main()
