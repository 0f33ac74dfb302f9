"""`POST /tokenize` and `POST /detokenize`, as in vLLM."""

from fastapi import Request
from starlette.responses import JSONResponse, Response

from lorakeet.server.api.chat import chat_tokens
from lorakeet.server.api.schemas import DetokenizeRequest, TokenizeRequest, read_body
from lorakeet.server.errors import BadRequestError
from lorakeet.server.profiles import Profile
from lorakeet.server.state import Server, server_of

_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("Send either prompt or messages", param="prompt")
    adapter = await server.registry.resolve(body.model or server.base_name, body.adapter)
    async with server.registry.lease(adapter) as version:
        profile = await server.profile(version)
        token_ids = await _tokens(server, profile, body)
    answer = {
        "count": len(token_ids),
        "max_model_len": server.engine.info.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [profile.tokenizer.token_text(token_id) for token_id in token_ids]
    return JSONResponse(answer)


async def _tokens(server: Server, profile: Profile, body: TokenizeRequest) -> list[int]:
    special = body.add_special_tokens
    if body.prompt is not None:
        for name in _CHAT_FIELDS:
            if getattr(body, name) is not None:
                raise BadRequestError(f"{name} needs messages", param=name)
        special = True if special is None else special
        return await server.encode(profile, body.prompt, "prompt", special)
    assert body.messages is not None
    return await chat_tokens(
        server,
        profile,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
        add_special_tokens=bool(special),
    )


async def detokenize(request: Request) -> Response:
    server = server_of(request)
    body = await read_body(request, DetokenizeRequest)
    adapter = await server.registry.resolve(body.model or server.base_name, body.adapter)
    async with server.registry.lease(adapter) as version:
        text = await server.decode(await server.profile(version), body.tokens, "tokens")
    return JSONResponse({"prompt": text})
