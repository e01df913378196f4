"""benchctl: benchmark and load-test LLM serving."""

__version__ = "0.1.0"
