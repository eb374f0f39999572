"""The pieces of DeepSeek-V4. Each takes the Forward context and the step's plan by hand."""
