"""Entry points of torch.hub.

`torch.hub.load(REPOSITORY, 'ppma_tiny', pretrained=True)` builds a model as `timm.create_model` does, with the same
keyword arguments. `REPOSITORY` is `OWNER/subquad`, or the folder of a checkout with `source='local'`. `torch.hub.list`
lists the names, and `torch.hub.help` describes one.
"""
# torch.hub checks these before it loads a model; setup.py names their versions.
dependencies = ['torch', 'timm', 'numpy', 'safetensors', 'huggingface_hub', 'filelock']

import subquad  # noqa: E402, F401  (before timm, with which it registers its models)

# isort: split
import timm  # noqa: E402

globals().update({entry.__name__: entry for entry in map(timm.model_entrypoint, timm.list_models())
                  if entry.__module__.startswith('subquad.')})
