"""SkipLog: log lines for skipped steps. Skips during the search for a loss scale are summarized."""

from __future__ import annotations

import logging

from core.optimizer.loss_scaler import LossScaler

logger = logging.getLogger("core.optimizer.optimizer")  # logged under the optimizer's name


class SkipLog:
    """Log of one optimizer's skipped steps, on the rank that writes the log.

    A dynamic loss scale begins far too high (2**32) and is reduced by one overflow per step, before any update is made.
    Only the first of these skips is logged at once, with its reason. The next step that is made reports the others
    together. If the scale has reached its minimum, the search has failed, and every skipped step is logged again.
    """

    def __init__(self) -> None:
        self._made = False  # True after the first step that was made
        self._from: float | None = None  # loss scale at the first skip of the search
        self._unreported = 0

    def skipped(self, reason: str, scaler: LossScaler | None, scale_before: float) -> None:
        """Log a skipped step, or count it if it is part of the search for a loss scale.

        ``scale_before`` is the factor that this step's loss was multiplied by.
        """
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
        """Record a step that was made with this loss scale. After the first call it costs one comparison."""
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
