"""Whether a step is fit to be taken: steps that would spoil the weights are left out."""

import math
import statistics
from collections import deque

WINDOW = 50  # steps that a spike is measured against
ENOUGH = 10  # of them, before anything can be called a spike


class Guard:
    """Judges each step by its loss and gradient norm, which every rank must have alike.

    A step is unfit if either is not finite or, with `spike`, more than `spike` times the
    median of the last 50 fit steps (once there are 10). `patience` unfit steps in a row are one
    too many: FloatingPointError.
    """

    def __init__(self, patience: int, spike: float | None = None) -> None:
        self.patience, self.spike = patience, spike
        self._fit: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._unfit_in_a_row = 0

    def judge(self, step: int, loss: float, norm: float) -> str | None:
        """Why step `step`, counted from 1, must be left out; None if it is fit."""
        reason = self._reason(loss, norm)
        if reason is None:
            self._fit.append((loss, norm))
            self._unfit_in_a_row = 0
            return None
        self._unfit_in_a_row += 1
        if self._unfit_in_a_row >= self.patience:
            row = f"the {self.patience} steps up to it" if self.patience > 1 else "it"
            raise FloatingPointError(
                f"step {step}: {reason}; {row} could not be taken: try a lower --lr or another "
                "--seed, or look at the data of these steps"
            )
        return reason

    def _reason(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss + norm):
            return f"loss {loss}, gradient norm {norm}"
        if not self.spike or len(self._fit) < ENOUGH:
            return None
        usual = [statistics.median(figures) for figures in zip(*self._fit, strict=True)]
        named = zip(("loss", "gradient norm"), (loss, norm), usual, strict=True)
        for name, value, middle in named:
            if value > self.spike * middle:
                return f"{name} {value:.4g} is a spike, over {self.spike:g} times {middle:.4g}"
        return None

    def state(self) -> dict[str, list[float] | int]:
        """What a checkpoint keeps, so that a resumed run judges as one that was not stopped."""
        losses, norms = map(list, zip(*self._fit, strict=True)) if self._fit else ([], [])
        return {"losses": losses, "norms": norms, "unfit": self._unfit_in_a_row}

    def restore(self, state: dict[str, list[float] | int]) -> None:
        """Take over what `state` returned."""
        self._fit.clear()
        self._fit.extend(zip(state["losses"], state["norms"], strict=True))
        self._unfit_in_a_row = state["unfit"]
