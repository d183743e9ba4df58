"""What Triton counted of one model version between two moments."""

from __future__ import annotations

from typing import Any


def executions_between(before: Any, after: Any) -> dict[int, int]:
    """Batch size → executions, from the statistics of two moments; only sizes that occurred."""
    earlier = {row.batch_size: row.compute_infer.count for row in before.batch_stats}
    counts = {
        row.batch_size: row.compute_infer.count - earlier.get(row.batch_size, 0)
        for row in after.batch_stats
    }
    return {size: count for size, count in sorted(counts.items()) if count}
