"""evaluate: a drafter and its target in, the acceptance length out.

Some held-out prompts are really decoded, by the target alone and losslessly with the drafter before it; all others go
through the parallel walk, which drafts at every anchor of a known answer at once and is checked against the decoding.
Follows DFlash (arXiv 2602.06036, section 4.3).
"""
