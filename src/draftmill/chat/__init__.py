"""A target's chat template and tokenizer, without torch or transformers: messages in; text, ids, turn borders out."""
