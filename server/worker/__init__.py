"""The GPU-worker process (also on CPU): device set-up, model runner, persistent batch, sampler."""
