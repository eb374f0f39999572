"""Text in and out: tokenizer, incremental detokenizer, stop strings, chat templates. Reads model files, nothing else."""
