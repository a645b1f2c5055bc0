"""Command-line tools: `subquad NAME ...` or `python -m subquad.tools.NAME ...`."""
if __name__ != 'subquad.tools':
    raise ImportError(f'import subquad.tools instead of {__name__!r}: the folder tools/ is not a top-level package')
