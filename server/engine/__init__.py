"""The engine core: scheduler, KV-cache manager, core loop. Pure Python; torch is never imported here."""
