"""The drafter network: its shape, attention, mask, loss, decoding cache, checkpoint files. Torch; nothing of training.

In come target features and block tokens' embeddings, out go hidden states for the target's own head. Follows DFlash
(arXiv 2602.06036) in the z-lab layout of parameters and config.
"""
