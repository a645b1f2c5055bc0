"""Register the data sets that classification and sequence configs name; configs import it by `custom_imports`."""
from . import image_sets, sequences, token_sets  # noqa: F401
