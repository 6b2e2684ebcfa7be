"""FLOPs, peaks, utilisation, and where a run's metrics go: files, trackers, the terminal.

Keys of a line of `metrics.jsonl`: `step`, `loss` (nats per token), `grad_norm` (before clipping), `learning_rate`,
`tokens` (processed so far), `tokens_per_second`, `step_seconds`, `mfu` (fraction of the peak), where they apply
`loss_scale` and `skipped` (steps so far that were not finite); after an evaluation `eval/loss` (nats per token) and
`eval/bits_per_byte`. A figure that is not known yet has no key; one that is not finite is the string "NaN", "Infinity"
or "-Infinity".
"""

from jaxpar.metrics.flops import CONVENTION, FlopsPerToken, count_matmul_flops, transformer_flops_per_token
from jaxpar.metrics.hardware import Peak, find_accelerator, find_peak, measure_matmul_peak, peak_tflops
from jaxpar.metrics.progress import Progress, ProgressKind, make_progress
from jaxpar.metrics.units import with_unit
from jaxpar.metrics.utilisation import Rates, Throughput
from jaxpar.metrics.writers import JsonLinesWriter, TensorBoardWriter, Value, WandbWriter, Writer, make_writers

__all__ = [
    "CONVENTION",
    "FlopsPerToken",
    "JsonLinesWriter",
    "Peak",
    "Progress",
    "ProgressKind",
    "Rates",
    "TensorBoardWriter",
    "Throughput",
    "Value",
    "WandbWriter",
    "Writer",
    "count_matmul_flops",
    "find_accelerator",
    "find_peak",
    "make_progress",
    "make_writers",
    "measure_matmul_peak",
    "peak_tflops",
    "transformer_flops_per_token",
    "with_unit",
]
