"""The small network of each family of image backbones, for tests that hold for all of them."""
import timm

from subquad.backbones.hierarchical import HierarchicalBackbone
from subquad.tools.engine.zoo import our_models

# Name -> class, for the models test_*.
FAMILIES = {name: type(timm.create_model(name, device='meta')) for name in our_models() if name.startswith('test_')}
SKELETON = [name for name, cls in FAMILIES.items() if issubclass(cls, HierarchicalBackbone)]
