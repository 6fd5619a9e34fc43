"""MFU by hand, against published figures, and on GPUs by their names."""

from __future__ import annotations

import pytest

from llama import LlamaConfig
from llama.finetune.speed import Utilisation, Work, peak_tflops

MPT_70B = 64_862_437_376


def test_the_flops_of_a_step_are_those_counted_by_hand():
    # 10 parameters, 2 layers of width 3, documents of 4 and 2 tokens.
    work = Work(tokens=6, squares=4 * 4 + 2 * 2, seconds=2.0)
    assert Utilisation(10, 0, 2, 3, 1, None).flops(work) == 6 * 10 * 6 + 12 * 2 * 3 * 20 == 1800
    # Of ten parameters nine are frozen: forward 2 and backward 2 each, 2 more for the tenth.
    assert Utilisation(1, 9, 2, 3, 1, None).flops(work) == (6 + 4 * 9) * 6 + 1440


def test_mfu_divides_by_the_peak_of_all_gpus():
    use, work = Utilisation(10**9, 0, 10, 1000, 4, 100), Work(1000, 10**6, 0.1)
    assert use.flops(work) == 6 * 10**12 + 12 * 10**10
    assert use.mfu(work) == pytest.approx(6.12e12 / 0.1 / 400e12)
    assert use._replace(gpus=16).mfu(work) == pytest.approx(use.mfu(work) / 4)


@pytest.mark.parametrize(
    ("tokens_per_second_per_gpu", "gpus", "peak", "published"),
    [(410, 64, 312, 53.3), (882, 32, 989, 36.2)],
)
def test_published_rows_of_llm_foundry_come_out(tokens_per_second_per_gpu, gpus, peak, published):
    """Within half of the last digit of both published figures."""

    def percent(rate: float) -> float:
        tokens = rate * gpus * 1000
        work = Work(tokens, tokens / 2048 * 2048**2, 1000.0)
        return 100 * Utilisation(MPT_70B, 0, 80, 8192, gpus, peak).mfu(work)

    low, high = percent(tokens_per_second_per_gpu - 0.5), percent(tokens_per_second_per_gpu + 0.5)
    assert low < published + 0.05 and published - 0.05 < high
    assert percent(tokens_per_second_per_gpu) == pytest.approx(published, abs=0.1)


def test_the_70b_run_that_took_97_seconds_a_step_reached_its_2_9_percent():
    config = LlamaConfig.preset("70b")
    use = Utilisation(config.num_parameters, 0, config.n_layers, config.dim, 16, 312)
    assert f"{use.mfu(Work(16 * 2048, 16 * 2048**2, 97.0)):.1%}" == "2.9%"


def test_packing_short_documents_counts_their_squares_and_not_the_rows():
    use = Utilisation(10**6, 0, 32, 4096, 1, 312)
    one, four = Work(2048, 2048**2, 1.0), Work(2048, 4 * 512**2, 1.0)
    assert use.flops(one) - use.flops(four) == 12 * 32 * 4096 * (2048**2 - 4 * 512**2)


def test_the_formula_shows_every_figure_that_it_is_made_from():
    use, work = Utilisation(6_738_415_616, 0, 32, 4096, 8, 312), Work(1_000_000, 5 * 10**8, 30.0)
    text = use.formula(work)
    assert text == (
        "MFU = (6 x 6,738,415,616 x 1,000,000 tokens + 12 x 32 x 4096 x 500,000,000 squared "
        "lengths) / 30.0 s / (8 x 312 TFLOP/s) = 55.0%"
    )
    figures = text.replace(",", "").removeprefix("MFU = ").replace("TFLOP/s", "* 1e12")
    for word in (" tokens", " squared lengths", " s "):
        figures = figures.replace(word, " ")
    formula, _, result = figures.replace(" x ", " * ").rpartition(" = ")
    assert eval(formula) == pytest.approx(use.mfu(work))
    assert result == f"{use.mfu(work):.1%}"
    lora = use._replace(trained=1000, frozen=6_738_415_616).formula(work)
    assert "((6 x 1,000 + 4 x 6,738,415,616 frozen) x 1,000,000 tokens" in lora


@pytest.mark.parametrize("use", [Utilisation(10, 0, 2, 3, 1, None), Utilisation(10, 0, 2, 3, 1, 9)])
def test_without_a_peak_or_a_time_there_is_no_mfu_and_the_text_says_what_to_give(use):
    work = Work(6, 20, 2.0 if use.peak_tflops is None else 0.0)
    assert use.mfu(work) is None
    remedy = "give --peak-tflops" if use.peak_tflops is None else "no step was timed"
    assert use.formula(work).startswith("MFU not known") and remedy in use.formula(work)


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
        ("Tesla V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("Tesla V100S-PCIE-32GB", 130),
        ("Tesla T4", 65),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA A100X-like", None),
        ("AMD Instinct MI300X", None),
        (None, None),
    ],
)
def test_the_dense_peak_of_a_gpu_is_known_by_its_name(gpu, peak):
    assert peak_tflops(gpu, bf16=True) == peak
    assert peak_tflops(gpu, bf16=False) is None
    assert peak_tflops(gpu, bf16=False, given=42.5) == 42.5


@pytest.mark.parametrize("given", [0.0, -1.0, float("nan")])
def test_a_peak_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match=r"--peak-tflops .* must be above 0"):
        peak_tflops("NVIDIA A100-SXM4-80GB", True, given)
