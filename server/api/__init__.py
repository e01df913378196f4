"""HTTP process: OpenAI-compatible API, tokenizer, incremental detokenizer, SSE and metrics. Imports no torch."""
