"""The bundled LLM server: API process, engine core process, GPU worker process."""
