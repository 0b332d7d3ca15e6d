"""export: a checkpoint in, a folder out that serving engines load: config.json, model.safetensors, README.md, a card.

The layout is that of the z-lab checkpoints (DFlash, arXiv 2602.06036): a drafter's own tensors and nothing of the
target's; embedding and head are the target's when the drafter is served.
"""
