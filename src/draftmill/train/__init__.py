"""train: a tokenized set and a frozen target in, checkpoints of a drafter out.

In     the output of `draftmill tokenize`, and a target
Out    checkpoints/step-00001000/, metrics.jsonl, plan.json, recipe.json, card.json
How    every visit draws fresh anchors, the target's features are made in flight and never stored
Again  a rerun goes on from the newest complete checkpoint and ends in the same bytes
"""
