"""``prediction``: what a client expects the answer to be, tried as drafts."""

from __future__ import annotations

import msgspec

from specserve.core import SamplingParams, prediction_limit
from specserve.frontend.conversation import joined
from specserve.frontend.tokenizer import TooLong
from specserve.server.errors import ApiError
from specserve.server.front import Front
from specserve.server.protocol import GenerationRequest


async def with_prediction(front: Front, request: GenerationRequest, params: SamplingParams) -> SamplingParams:
    """The same with the token ids of the request's prediction. Raises ApiError for one that there is no room for."""
    if request.prediction is None:
        return params
    if not front.has_tokenizer:
        raise ApiError(400, "prediction: this server runs without a tokenizer", "prediction")
    most = prediction_limit(front.context_length)
    try:
        tokens = await front.encode_answer(joined(request.prediction.content), most)
    except TooLong as error:
        raise ApiError(400, f"prediction: {error}; it may have {most} at most", "prediction") from None
    return msgspec.structs.replace(params, prediction=tokens)
