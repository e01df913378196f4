"""Compiled mode: capture by Dynamo, split at attention, pieces by Inductor, disk cache, CUDA Graphs.

| module | what |
|---|---|
| `capture`, `split` | the model's forward as one graph, then as pieces around the attention calls |
| `pieces`, `plan`, `executor` | a compiled piece; which piece runs when; running it on the model's weights |
| `factors`, `store`, `explain` | the key of a compiled graph, where it is kept, why it was not found |
| `compiler` | all of the above in order: load or compile |
| `dispatch`, `cudagraph` | which batch runs under which CUDA Graph; recording and replaying them |
| `counters` | compilations since readiness |
"""

from server.compilation.explain import compile_cache, explain_cache

__all__ = ["compile_cache", "explain_cache"]
