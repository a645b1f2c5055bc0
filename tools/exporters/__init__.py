"""Export classifiers, feature pyramids, detectors and segmenters to the formats of other runtimes.

A `Subject` is what is exported: a model in its export form, the ordinary model to compare with, and the metadata. Each
file `to_FORMAT.py` writes one format and runs it: `convert(subject, options, path)` writes a file and describes it,
`load(path, threads)` returns a function from images (B, C, H, W), float32, to the list of the file's outputs, and
`read_metadata(path)` returns what the file says about itself. `pipeline.export` puts these together.
"""
