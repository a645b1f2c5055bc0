# Train a small PPMA on scikit-learn's handwritten digits with a teacher, a small MobileViTv2. Train the teacher first:
#   subquad train test-mobilevitv2_digits
#   subquad train test-ppma_digits-distilled
# Another teacher: --cfg-options model.distillation.teacher.weights=FILE
_base_ = 'test-ppma_digits.py'

model = dict(distillation=dict(
    type='Distillation', kind='soft', alpha=0.5, temperature=3.0,
    teacher=dict(weights='runs/test-mobilevitv2_digits/last.safetensors')))
