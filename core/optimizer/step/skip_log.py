"""SkipLog: what the log says of skipped steps. Each has its line, but for those that only look for a loss scale."""

from __future__ import annotations

import logging

from core.optimizer.loss_scaler import LossScaler

logger = logging.getLogger("core.optimizer.optimizer")  # the optimizer speaks, wherever the sentence is put together


class SkipLog:
    """The lines of one optimizer, on the rank that writes the log.

    A dynamic loss scale begins far too high (2**32) and comes down by one overflow a step, before any update is made.
    Of these steps the first has its line, with the reason; the others are reported together by the next step. Where the
    scale has nowhere left to go the search has failed, and each skipped step has its line again.
    """

    def __init__(self) -> None:
        self._made = False  # True once a step has been made
        self._from: float | None = None  # the scale at the first skip of the search
        self._unreported = 0

    def skipped(self, reason: str, scaler: LossScaler | None, scale_before: float) -> None:
        """A step was skipped. scale_before: what this step's loss was multiplied by."""
        searching = scaler is not None and not self._made and scaler.value > getattr(scaler, "min_scale", scaler.value)
        if searching and self._from is not None:
            self._unreported += 1
            return
        if scaler is not None:
            reason += f"; the next loss scale is {scaler.value:g}"
        if searching:
            self._from = scale_before
            reason += ". Until a step is made, steps that only look for a loss scale are counted and reported together"
        logger.warning("optimizer step skipped on all ranks, parameters unchanged: %s", reason)

    def made(self, scale: float) -> None:
        """A step was made, of a loss that was multiplied by `scale`. Costs one comparison but for the first time."""
        if self._made:
            return
        self._made = True
        if self._unreported:
            logger.warning(
                "%d more steps were skipped while the loss scale came down from %g to %g, where gradients do not "
                "overflow; an initial_scale (initial_loss_scale) near that starts sooner",
                self._unreported,
                self._from,
                scale,
            )
