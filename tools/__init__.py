"""The commands of `subquad`, one module each."""
if __name__ != 'subquad.tools':
    raise ImportError(f'import subquad.tools instead of {__name__!r}: the folder tools/ is not a top-level package')
