"""estimate: what a training run will cost, before it runs; a target's config and an amount of text in, figures out."""
