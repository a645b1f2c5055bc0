"""Command-line tools: `subquad NAME ...` or `python -m subquad.tools.NAME ...`."""
if __name__ != 'subquad.tools':
    raise ImportError(f"import subquad.tools, not {__name__!r}: the folder of the checkout is not a package of its own")
