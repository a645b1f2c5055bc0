"""Names of ImageNet's test sets and of its classes."""
from typing import List

# The test sets, and timm's file with the indices of the classes that each uses; '' for all 1,000.
TEST_SETS = {'imagenet': '', 'imagenet-v2': '', 'imagenet-a': 'imagenet_a_indices.txt',
             'imagenet-r': 'imagenet_r_indices.txt', 'imagenet-sketch': '', 'real': ''}


def readable(classes: List[str]) -> List[str]:
    """Return names for people: WordNet ids such as n01440764 with their first word, other names as they are."""
    from timm.data import ImageNetInfo
    info = ImageNetInfo()
    known = set(info.label_names()) & set(classes)
    return [f"{name} {info.label_name_to_description(name).split(',')[0]}" if name in known else name
            for name in classes]
