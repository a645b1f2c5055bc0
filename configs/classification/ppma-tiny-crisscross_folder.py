# Train PPMA-T with criss-cross attention in every stage, for images much larger than 224 x 224. Otherwise this config
# equals ppma-tiny_folder.py.
_base_ = 'ppma-tiny_folder.py'

model = dict(name='ppma_tiny_crisscross')
