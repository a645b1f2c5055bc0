"""Export classifiers, feature pyramids, detectors and segmenters to the formats of other runtimes.

A `Subject` is what is exported: a model in its export form, the ordinary model to compare with, and the metadata. Each
file `to_FORMAT.py` writes one format and runs it. `pipeline.export` puts these together.
"""
