"""Text in and out: tokenizer, incremental detokenizer, stop strings, chat templates. Only I/O: model files."""
