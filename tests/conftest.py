import subquad  # noqa: F401  (before timm: it mends a torchvision of another build)
