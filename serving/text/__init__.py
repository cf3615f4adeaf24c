"""Text on either side of token ids: tokenizer, chat template, detokenizer."""
