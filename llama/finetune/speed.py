"""How much of its GPUs a run uses: model FLOPs utilisation, by a formula that it prints.

    MFU = (6 N tokens + 12 L d sum(len^2)) / seconds / (GPUs x peak)

N parameters, L layers of width d, tokens of all ranks, padding left out, and the square of each
document's length, so that neither padding nor packing flatters (PaLM: Chowdhery et al.,
arXiv:2204.02311, appendix B, where all documents are equally long). A parameter costs 2 FLOPs a
token forward, 2 backward for its input's gradient and 2 for its own; a frozen one saves the last.
As published figures do, it counts whole squares though a causal mask leaves half of them, every
parameter though an embedding is only looked up, and no recomputation of activations.
"""

import re
from typing import NamedTuple

WARM_UP_STEPS = 2  # of a launch, left out of its speed: they make what lasts, and may be profiled

# A pattern of `torch.cuda.get_device_name` and dense bfloat16 TFLOP/s with float32 accumulation;
# the first that fits holds. From NVIDIA's data sheet of each, halved where it has only the figure
# "with sparsity"; RTX cards: the architecture papers GA102, Ada (AD102) and RTX Blackwell; A10G:
# AWS's G5. V100 and T4 have no bfloat16 units: theirs is float16's.
PEAK_TFLOPS = (
    (r"\bMIG\b|Laptop|Max-Q|4090 D\b", None),  # a slice of the named GPU, or a slower one
    (r"\bGB200\b", 2500),
    (r"\bB200\b", 2250),
    (r"\bH100 NVL\b", 835),
    (r"\bH100\b.*PCIe", 756),
    (r"\b(H100|H200|H800|GH200)\b", 989),
    (r"\bH20\b", 148),
    (r"\b(A100|A800)\b", 312),
    (r"\bA10G\b", 70),
    (r"\bA10\b", 125),
    (r"\bA30\b", 165),
    (r"\bA40\b", 149.7),
    (r"\bRTX A6000\b", 154.8),
    (r"\bL40S\b", 362),
    (r"\bL40\b", 181),
    (r"\bL4\b", 121),
    (r"\bRTX 6000 Ada\b", 364),
    (r"\bRTX 5090\b", 209.5),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b(?! Ti)", 71),
    (r"\bV100S\b", 130),
    (r"\bV100.*PCIE", 112),
    (r"\bV100\b", 125),
    (r"\bT4\b", 65),
)


def peak_tflops(gpu: str | None, bf16: bool, given: float | None = None) -> float | None:
    """Dense TFLOP/s of one GPU called `gpu` (`torch.cuda.get_device_name`); None if not known.

    `given` goes before the table. Without `bf16` it is not known, nor on a CPU (`gpu` None): what
    float32 reaches depends on whether TF32 is on, and a CPU's on its clock.
    """
    if given is not None:
        if not given > 0:
            raise ValueError(f"--peak-tflops {given} must be above 0")
        return given
    if gpu is None or not bf16:
        return None
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, gpu)), None)


class Work(NamedTuple):
    """What the tokens of a step, or of many, cost, and in what time: of all ranks together."""

    tokens: int  # padding left out
    squares: int  # sum over documents of their length in tokens, squared
    seconds: float


class Utilisation(NamedTuple):
    """Model FLOPs and their share of the peak; made from what does not change in a run."""

    trained: int  # parameters that learn, of the whole model
    frozen: int  # those that do not
    layers: int
    dim: int
    gpus: int  # ranks
    peak_tflops: float | None  # of one GPU; None: not known

    def flops(self, work: Work) -> int:
        """FLOPs of the model for `work`, whatever an engine recomputes."""
        matrices = (6 * self.trained + 4 * self.frozen) * work.tokens
        return matrices + 12 * self.layers * self.dim * work.squares

    def mfu(self, work: Work) -> float | None:
        """Share of the peak, 1.0 being all of it; None where the peak is not known."""
        if self.peak_tflops is None or work.seconds <= 0:
            return None
        return self.flops(work) / work.seconds / (self.gpus * self.peak_tflops * 1e12)

    def formula(self, work: Work) -> str:
        """The formula with its figures filled in, or why there is none."""
        mfu = self.mfu(work)
        if self.peak_tflops is None:
            return "MFU not known: no peak of this device and precision; give --peak-tflops"
        if mfu is None:
            return "MFU not known: no step was timed"
        parameters = f"6 x {self.trained:,}"
        if self.frozen:
            parameters = f"({parameters} + 4 x {self.frozen:,} frozen)"
        return (
            f"MFU = ({parameters} x {work.tokens:,} tokens + 12 x {self.layers} x {self.dim} x "
            f"{work.squares:,} squared lengths) / {work.seconds:,.1f} s / "
            f"({self.gpus} x {self.peak_tflops:g} TFLOP/s) = {mfu:.1%}"
        )
