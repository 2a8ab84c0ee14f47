"""Measure peak memory and time of log-probabilities at a large vocabulary: chunked against plain.

    python benchmarks/chunked.py [--rows 2048] [--width 256] [--vocabulary 150000] [--entropy]

Forward and backward, each in a process of its own, so that one's peak cannot hide the other's. The peak is resident
memory on a CPU less what the process held before: its inputs and one gradient of the head, which any way needs. Loss
and gradient norms of all ways are printed, to be the same.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from pack_torch import chunked_log_probs, target_log_probs

WAYS = ("plain", "64", "256", "1024")


def peak_mib() -> float:
    """Return the most memory this process has held. Linux counts KiB, macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)


def measure(way: str, rows: int, width: int, vocabulary: int, entropy: bool) -> dict[str, float]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=draw).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) * width**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=draw)
    # The libraries' own memory is not the method's, nor is a gradient of the head's size.
    (hidden[:1] @ weight[:8].T).sum().backward()
    hidden.grad = weight.grad = None
    before, begin = peak_mib(), time.perf_counter()
    if way == "plain":
        logits = hidden @ weight.T
        values = target_log_probs(logits, targets)
        spread = None
        if entropy:
            logs = logits.log_softmax(-1)
            spread = -(logs.exp() * logs).sum(-1)
    else:
        values, spread = chunked_log_probs(hidden, weight, targets, chunk=int(way), entropy=entropy)
    total = values.sum() if spread is None else values.sum() + spread.sum()
    total.backward()
    return {
        "peak_mib": peak_mib() - before,
        "seconds": time.perf_counter() - begin,
        "loss": float(total.detach()),
        "hidden_gradient": float(hidden.grad.double().norm()),
        "weight_gradient": float(weight.grad.double().norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--way", choices=WAYS)
    options = parser.parse_args()
    if options.way:
        shape = (options.rows, options.width, options.vocabulary, options.entropy)
        print(json.dumps(measure(options.way, *shape)))
        return
    one = options.rows * options.vocabulary * 4 / 2**20
    head = options.vocabulary * options.width * 4 / 2**20
    print(
        f"{options.rows:,} rows, width {options.width:,}, vocabulary {options.vocabulary:,}, float32, entropy "
        f"{options.entropy}; one [S, V] is {one:,.0f} MiB, the head's gradient {head:,.0f} MiB"
    )
    print(f"{'way':>12} {'peak MiB':>10} {'seconds':>8} {'loss':>16} {'|d hidden|':>12} {'|d head|':>12}")
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{way if way == 'plain' else 'chunk ' + way:>12} {found['peak_mib']:>10,.0f} {found['seconds']:>8.2f} "
            f"{found['loss']:>16.4f} {found['hidden_gradient']:>12.6f} {found['weight_gradient']:>12.6f}"
        )


if __name__ == "__main__":
    main()
