"""What the rooms agree on: errors, rows, samples, cards, the block rule, acceptance. Imports nothing of ours."""
