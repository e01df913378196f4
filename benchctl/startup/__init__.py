"""The start-up benchmark: fresh processes, cold and warm caches, phases that add up.

| module | what |
|---|---|
| `measure` | starts servers, one after the other |
| `summary` | medians and spread per phase over the repeats |
| `output` | console table, Markdown, CSV, JSON |
"""
