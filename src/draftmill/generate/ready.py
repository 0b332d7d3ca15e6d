"""Before a served run: one look at every endpoint, and what it means for the prompts."""

import logging
import os
from dataclasses import replace
from typing import Any

from draftmill.contracts.errors import ServingError
from draftmill.generate.manner import Manner, sampling_of
from draftmill.serving.endpoint import EndpointFigures
from draftmill.serving.fleet import Fleet
from draftmill.serving.limits import FleetLimits
from draftmill.serving.probe import ProbeWish
from draftmill.settings.generate import GenerateSettings

logger = logging.getLogger(__name__)


def limits_of(settings: GenerateSettings) -> FleetLimits:
    """What the run allows its engines; the key comes from the environment alone."""
    return FleetLimits(
        max_in_flight=settings.max_in_flight,
        max_attempts=settings.max_attempts,
        max_timeouts=settings.max_timeouts,
        max_failures_in_row=settings.max_failures_in_row,
        connect_timeout_s=settings.connect_timeout_s,
        min_timeout_s=settings.min_timeout_s,
        min_rate_tok_per_s=settings.min_rate_tok_per_s,
        api_key=os.environ.get("OPENAI_API_KEY") or None,
    )


async def agreed(fleet: Fleet, manner: Manner) -> Manner:
    """The manner with the window that every endpoint has; ServingError where one does not do what is wanted."""
    settings = manner.settings
    found = await fleet.probe(
        ProbeWish(
            model=settings.served_name or settings.target,
            thinking=manner.thinks,
            template_kwargs=dict(settings.switches),
            sampling=sampling_of(settings, settings.seed),
        )
    )
    if without := [result.url for result in found if not result.gives_token_ids]:
        told = f"{', '.join(without)}: no token ids are returned (vLLM and SGLang since 0.5.14 give them)"
        if settings.require_token_ids:
            raise ServingError(f"{told}, but --require-token-ids is given")
        logger.warning("%s: training data will be tokenized anew from the text", told)
    windows = [window for window in (manner.window, *(result.window_tokens for result in found)) if window is not None]
    window = min(windows, default=None)
    if window is None:
        logger.warning("nobody says how large the target's window is: prompts that do not fit will be refused")
    elif settings.max_new_tokens >= window:
        logger.warning("the window of %d tokens leaves less than --max-new-tokens to every answer", window)
    if manner.thinks and settings.temperature == 0:
        logger.warning(
            "the target thinks and decodes greedily: many such models then repeat themselves; see --temperature"
        )
    return replace(manner, window=window)


def endpoint_on_card(figures: EndpointFigures) -> dict[str, Any]:
    """What the card tells of an endpoint."""
    return {
        "url": figures.url,
        "requests": figures.requests,
        "output_tokens": figures.output_tokens,
        "retries": figures.retries,
    }
