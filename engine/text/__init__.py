"""Text: tokenizer, incremental detokenizer, chat template, stop strings. Pure Python, no torch."""
