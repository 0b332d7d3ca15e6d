"""speculation: a drafter before its target, measured: plain and speculative greedy decoding, and the parallel walk.

Evaluate does it to a finished drafter, train to one in the making; both read the same held-out requests. Follows DFlash
(arXiv 2602.06036, section 4.3). `requests.py` and `leak.py` need no torch.
"""
