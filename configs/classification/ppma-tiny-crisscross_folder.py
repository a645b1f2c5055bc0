# As ppma-tiny_folder.py, with criss-cross attention in every stage: for images much larger than 224.
_base_ = 'ppma-tiny_folder.py'

model = dict(name='ppma_tiny_crisscross')
