"""First calls of everything that sampling runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from server.worker.sampler import RandomRows, SamplingMetadata, greedy, sample

_THREADS = 6


@torch.inference_mode()
def warm_up_sampling(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sample in every way that has kernels of its own: logits as they are and after penalties, from all of the
    vocabulary and from a part."""
    logits = torch.zeros((2, vocab_size), dtype=dtype, device=device)

    @torch.inference_mode()
    def run(form: torch.Tensor, limited: bool | None) -> None:
        if limited is None:
            greedy(form).tolist()
        else:
            sample(form.clone(), *random_rows(len(form), vocab_size, device, limited=limited)).tolist()

    # Compiling holds the lock of the interpreter; the threads are for what waits, for builders and for the disk.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="sampling") as pool:
        done = [pool.submit(run, form, way) for form in (logits, logits.float()) for way in (None, False, True)]
        for future in done:
            future.result()


def random_rows(
    count: int, vocab_size: int, device: torch.device, *, limited: bool
) -> tuple[SamplingMetadata, torch.Tensor]:
    """Metadata of `count` rows that sample, `limited`: from a part of the vocabulary; and their positions."""
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    random = RandomRows(
        rows=None,
        temperature=torch.ones(count, device=device),
        seeds=zeros,
        top_k=zeros + vocab_size // 2 if limited else None,
        top_p=torch.full((count,), 0.9, device=device) if limited else None,
        min_p=None,
        max_top_k=vocab_size // 2 if limited else vocab_size,
    )
    return SamplingMetadata(random=random), zeros
