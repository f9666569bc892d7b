"""Serve a Hugging Face model on several ranks: HTTP on rank 0, the same on every rank.

    client --HTTP-->  rank 0: thread of the front --> inbox          rank 1, 2, ...
                      rank 0: main thread: Turn(admit, drop, tokens)
                      broadcast, as JSON in bytes  ................  broadcast
                      a forward of each batch      ..collectives...  a forward of each batch
                      choose the next tokens, send them to clients

A batch is continuous: requests join it after any token, and leave it when they are done. Each
adapter has a batch of its own. Rank 0 alone chooses tokens, so that ranks need no common seed and
cannot disagree. docs/serving.md tells the rest.

The model is split over the ranks by tensor parallelism, or with --stages into the stages of a
pipeline, of which each rank has its own layers with their keys and values.

    python examples/serve.py --launch 4             random weights, on 4 local processes
    python examples/serve.py --launch 2 --stages    two stages, a layer each
    torchrun --nproc-per-node 4 examples/serve.py --model path/to/llama --adapter fr=path/to/adapter
    curl -N localhost:8000/generate -d '{"prompt": [5, 6, 7], "stream": true}'

Needs the extra `serve` (starlette, uvicorn, transformers, peft).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import shardmesh as sm

# -- requests --------------------------------------------------------------------------------------


@dataclass
class Request:
    """What a client asks for.

    Attributes:
        number: counts the requests of the server.
        prompt: token ids.
        max_new_tokens: most tokens to generate; fewer where the model ends by itself.
        temperature: 0 for the most probable token, else tokens are drawn.
        seed: of what is drawn.
        adapter: name of an adapter; "" for the model as it is.
    """

    number: int
    prompt: list[int]
    max_new_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    adapter: str = ""


class BadRequest(ValueError):
    """A request that cannot be answered; the text is for the client."""


class ServerEnds(Exception):
    """The server ends before a request has been answered."""


Token = int | ServerEnds | None  # what a client is sent: tokens, and None after the last


_KEYS = {"prompt", "max_new_tokens", "temperature", "seed", "adapter", "stream"}


def parse_request(body: bytes, number: int, limits: Limits) -> tuple[Request, bool]:
    """Return the request in the body of an HTTP call, and whether its tokens are to be streamed.

    All checks are made here, on one rank and before any other rank knows of the request.

    Raises: BadRequest.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(asked, dict) or not asked.keys() <= _KEYS:
        raise BadRequest(f"the body must be an object with keys among {', '.join(sorted(_KEYS))}")
    prompt = limits.ids_of(asked.get("prompt"))
    count = asked.get("max_new_tokens", 16)
    if type(count) is not int or not 1 <= count <= limits.length - len(prompt):
        raise BadRequest(
            f"max_new_tokens must be from 1 to {limits.length - len(prompt)} after {len(prompt)} "
            f"tokens, got {count!r}"
        )
    temperature, seed = asked.get("temperature", 0.0), asked.get("seed", 0)
    if type(temperature) not in (int, float) or not 0 <= temperature <= 10:
        raise BadRequest(f"temperature must be a number from 0 to 10, got {temperature!r}")
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise BadRequest(f"seed must be an integer >= 0, got {seed!r}")
    adapter, stream = asked.get("adapter", ""), asked.get("stream", False)
    if adapter not in ("", *limits.adapters):
        raise BadRequest(f"there is no adapter {adapter!r}, only {limits.adapters}")
    if type(stream) is not bool:
        raise BadRequest(f"stream must be true or false, got {stream!r}")
    return Request(number, prompt, count, float(temperature), seed, adapter), stream


@dataclass
class Limits:
    """What the model can answer.

    Attributes:
        vocabulary: number of token ids.
        length: most tokens of a prompt and its answer.
        adapters: their names.
        tokenizer: for prompts that are text; None if there is none.
    """

    vocabulary: int
    length: int
    adapters: list[str]
    tokenizer: Any = None

    def ids_of(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt. Raises: BadRequest."""
        if isinstance(prompt, str) and self.tokenizer is not None:
            prompt = self.tokenizer(prompt)["input_ids"]
        if (
            not isinstance(prompt, list)
            or not prompt
            or not all(type(i) is int and 0 <= i < self.vocabulary for i in prompt)
        ):
            kind = "" if self.tokenizer is None else "a text or "
            raise BadRequest(
                f"prompt must be {kind}a list of one or more token ids below {self.vocabulary}"
            )
        if len(prompt) >= self.length:
            raise BadRequest(
                f"prompt has {len(prompt)} tokens, and the model is for {self.length}, with the "
                "answer"
            )
        return prompt


# -- what all ranks do -----------------------------------------------------------------------------


@dataclass
class Turn:
    """What all ranks do next.

    Attributes:
        admit: requests that join a batch.
        drop: numbers of requests that leave theirs.
        tokens: by adapter, the last token of each row of its batch, after `drop`.
        is_last: whether the server ends.
    """

    admit: list[dict[str, Any]] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    is_last: bool = False


def broadcast_turn(turn: Turn | None, mesh: sm.DeviceMesh) -> Turn:
    """Return rank 0's turn on every rank.

    It travels as JSON, which can run nothing where it is read, in tensors on the CPU, where ranks
    wait without a time limit. Its length is padded, so that few different sizes are ever sent.
    """
    group = mesh.group()
    data = b"" if turn is None else json.dumps(asdict(turn)).encode()
    size = torch.tensor([len(data)])
    group.broadcast(size, 0)
    length = int(size)
    buffer = torch.zeros(max(1024, 1 << (length - 1).bit_length()), dtype=torch.uint8)
    if data:
        buffer[:length] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group.broadcast(buffer, 0)
    return Turn(**json.loads(bytes(buffer[:length].numpy())))


KeysAndValues = list[tuple[Tensor, Tensor]]  # of each layer: [rows, heads, positions, width]
# ids, mask and positions of the new tokens, what is known of the tokens before -> logits
# [rows, vocabulary] after the last token, and what is known of all tokens
Forward = Callable[[Tensor, Tensor, Tensor, KeysAndValues], tuple[Tensor, KeysAndValues]]


def forward_of(model: nn.Module) -> Forward:
    """Return the forward of a model that every rank has, or a part of each of its layers."""

    def forward(
        ids: Tensor, mask: Tensor, positions: Tensor, cache: KeysAndValues
    ) -> tuple[Tensor, KeysAndValues]:
        result = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=transformers.DynamicCache(cache or None),
            use_cache=True,
            logits_to_keep=1,
        )
        logits = result.logits[:, -1]
        whole = logits.full_tensor() if isinstance(logits, sm.ShardedTensor) else logits
        return whole, [(layer.keys, layer.values) for layer in result.past_key_values.layers]

    return forward


class Batch:
    """The requests that are answered with one adapter, a row each, with their keys and values.

    Rows begin where their prompt begins: shorter ones have a padding before it.

        prompt 5 6 7, answer 8       5 6 7 8        mask 1 1 1 1
        prompt 9, answer 3           . . 9 3             0 0 1 1

    Attributes:
        rows: the requests.
    """

    def __init__(self, forward: Forward) -> None:
        self.rows: list[Request] = []
        self._forward = forward
        self._mask = torch.zeros(0, 0, dtype=torch.long)
        self._cache: KeysAndValues = []

    def drop(self, numbers: Sequence[int]) -> None:
        """Remove requests, and the padding that no other row needs."""
        keep = [place for place, row in enumerate(self.rows) if row.number not in numbers]
        if len(keep) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in keep]
        mask = self._mask[keep]
        first = int(mask.any(0).long().argmax()) if keep else 0
        self._mask = mask[:, first:]
        index = torch.tensor(keep)
        self._cache = (
            [(k[index][:, :, first:], v[index][:, :, first:]) for k, v in self._cache]
            if keep
            else []
        )

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits [rows, vocabulary] after one more token in each row."""
        self._mask = F.pad(self._mask, (0, 1), value=1)
        ids, mask = torch.tensor(tokens)[:, None], self._mask
        logits, self._cache = self._forward(ids, mask, _positions(mask, 1), self._cache)
        return logits

    def admit(self, requests: Sequence[Request]) -> Tensor:
        """Add rows, and return the logits [requests, vocabulary] after their prompts."""
        length = max(len(request.prompt) for request in requests)
        padded = [
            F.pad(torch.tensor(request.prompt), (length - len(request.prompt), 0))
            for request in requests
        ]
        real = [
            F.pad(
                torch.ones(len(request.prompt), dtype=torch.long), (length - len(request.prompt), 0)
            )
            for request in requests
        ]
        ids, mask = torch.stack(padded), torch.stack(real)
        logits, cache = self._forward(ids, mask, _positions(mask, length), [])
        self._join(mask, cache)
        self.rows += requests
        return logits

    def _join(self, mask: Tensor, cache: KeysAndValues) -> None:
        if not self.rows:
            self._mask, self._cache = mask, cache
            return
        length = max(mask.shape[1], self._mask.shape[1])
        self._mask = torch.cat([_padded(self._mask, length, 1), _padded(mask, length, 1)])
        pairs = zip(self._cache, cache, strict=True)
        self._cache = [
            (_joined(k, k2, length), _joined(v, v2, length)) for (k, v), (k2, v2) in pairs
        ]


def _positions(mask: Tensor, count: int) -> Tensor:
    """Return the positions [rows, count] of the last tokens, of which padding is none."""
    return (mask.cumsum(1) - 1).clamp(min=0)[:, -count:]


def _joined(rows: Tensor, more: Tensor, length: int) -> Tensor:
    """Return keys or values of all rows, padded to this length."""
    return torch.cat([_padded(rows, length, 2), _padded(more, length, 2)])


def _padded(x: Tensor, length: int, dim: int) -> Tensor:
    """Return x with zeros before it along a dim."""
    missing = length - x.shape[dim]
    return F.pad(x, (0,) * 2 * (x.dim() - dim - 1) + (missing, 0)) if missing else x


class Engine:
    """The model and its batches, in the same state on every rank.

    Attributes:
        batches: by name of the adapter.
    """

    def __init__(self, model: nn.Module, forward: Forward, adapters: Sequence[str]) -> None:
        self._model = model
        self.batches = {name: Batch(forward) for name in ("", *adapters)}

    @torch.inference_mode()
    def run(self, turn: Turn) -> dict[int, Tensor]:
        """Return the logits of the next token for each request."""
        requests = [Request(**values) for values in turn.admit]
        logits: dict[int, Tensor] = {}
        for name, batch in self.batches.items():
            batch.drop(turn.drop)
            joining = [request for request in requests if request.adapter == name]
            if not batch.rows and not joining:
                continue
            with self._adapter(name):
                if batch.rows:
                    numbers = [row.number for row in batch.rows]
                    logits |= zip(numbers, batch.decode(turn.tokens[name]), strict=True)
                if joining:
                    numbers = [request.number for request in joining]
                    logits |= zip(numbers, batch.admit(joining), strict=True)
        return logits

    def _adapter(self, name: str) -> AbstractContextManager[Any]:
        if name:
            self._model.set_adapter(name)  # type: ignore[operator]
            return nullcontext()
        if len(self.batches) == 1:
            return nullcontext()
        return self._model.disable_adapter()  # type: ignore[operator]


# -- a model in stages ----------------------------------------------------------------------------


class FilledPlaces(transformers.cache_utils.CacheLayerMixin):
    """Keys and values of a layer in tensors of a fixed length, of which a forward fills some."""

    def __init__(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._places = keys, values, places

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys = self.keys.index_copy_(2, self._places, key_states)  # type: ignore[union-attr]
        values = self.values.index_copy_(2, self._places, value_states)  # type: ignore[union-attr]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]  # type: ignore[union-attr]


class Decoder(nn.Module):
    """A model that takes the keys and values of its layers as arguments, as stages need them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        places: Tensor,
        cache: tuple[tuple[Tensor, Tensor], ...],
    ) -> Tensor:
        """Return the logits [rows, 1, vocabulary] after the last token.

        Args:
            mask: [rows, 1, tokens, length], added to the scores: 0 where a token attends, else the
                lowest number of the dtype.
            places: of the tokens in the keys and values, in which they are written.
            cache: for each layer, keys and values of a fixed length.
        """
        layers: list[Any] = [FilledPlaces(keys, values, places) for keys, values in cache]
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=transformers.Cache(layers=layers),
            use_cache=True,
            logits_to_keep=1,
        ).logits


class StagedForward:
    """A `Forward` of a model in stages: each rank keeps the keys and values of its own layers.

    Those of other layers are on "meta". Rows go through the stages in as many microbatches as there
    are stages, if there are enough. Stages are recorded for each shape of their inputs, so keys and
    values are padded to few lengths: here at the end, where `Batch` has its padding before rows.

    Raises:
        ValueError: layers that attend to a window of the tokens, or that keep something else than
            keys and values of `num_key_value_heads` heads, or that are not named `layers.0` etc.
    """

    _SMALLEST = 32

    def __init__(self, model: nn.Module, mesh: sm.DeviceMesh) -> None:
        config: Any = model.config
        layers = range(config.num_hidden_layers)
        _check_has_stages(model, [name for name, _ in model.named_parameters()], layers)
        self._pipe = sm.parallel.pipeline(Decoder(model), mesh, split="even", schedule="gpipe")
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self._heads = config.num_key_value_heads, width
        self._vocabulary = config.vocab_size
        names = [name for name, _ in self._pipe.named_parameters()]
        self._dtype = next(self._pipe.parameters()).dtype
        self._is_own = [_has_layer(names, layer) for layer in layers]

    def __call__(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: KeysAndValues
    ) -> tuple[Tensor, KeysAndValues]:
        rows, total = mask.shape
        length = max(self._SMALLEST, 1 << (total - 1).bit_length())
        places = torch.arange(total - ids.shape[1], total)
        filled = [
            (_lengthened(keys, length), _lengthened(values, length))
            for keys, values in cache or self._empty(rows)
        ]
        attended = F.pad(mask, (0, length - total))[:, None, None].bool()
        attended = attended & (torch.arange(length) <= places[:, None])
        # A token of the padding attends to itself: softmax of nothing is no number.
        attended = attended | (torch.arange(length) == places[:, None])
        # Eager attention adds the mask to the scores; the others take such a mask as well.
        lowest = torch.finfo(self._dtype).min
        scores = torch.zeros(attended.shape, dtype=self._dtype).masked_fill(~attended, lowest)
        parts = min(rows, self._pipe.schedule.stages)

        def split(x: Tensor) -> list[Tensor]:
            return list(x.tensor_split(parts))

        columns = [zip(split(keys), split(values), strict=True) for keys, values in filled]
        results = self._pipe.forward(
            split(ids),
            mask=split(scores),
            positions=split(positions),
            places=[places] * parts,
            cache=list(zip(*columns, strict=True)),
        )
        logits = torch.empty(rows, self._vocabulary, dtype=self._dtype)
        if results is not None:
            logits.copy_(torch.cat(results)[:, -1])
        self._pipe.mesh.group("pp").broadcast(logits, self._pipe.schedule.placement[-1])
        return logits, [(keys[:, :, :total], values[:, :, :total]) for keys, values in filled]

    def _empty(self, rows: int) -> KeysAndValues:
        heads, width = self._heads

        def empty(is_own: bool) -> Tensor:
            device = "cpu" if is_own else "meta"
            return torch.empty(rows, heads, 0, width, dtype=self._dtype, device=device)

        return [(empty(is_own), empty(is_own)) for is_own in self._is_own]


def _check_has_stages(model: nn.Module, names: Sequence[str], layers: Sequence[int]) -> None:
    """Raise ValueError if the example cannot serve the model in stages."""
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    others = sorted(set(types or ()) - {"full_attention"})
    problem = None
    if others:
        problem = f"it has layers of the types {others}, and only full_attention is supported"
    elif types is None and window is not None and getattr(config, "use_sliding_window", True):
        problem = f"its layers attend to a sliding window of {window} tokens"
    elif not getattr(config, "num_key_value_heads", None):
        problem = "its config has no num_key_value_heads"
    elif not all(_has_layer(names, layer) for layer in layers):
        problem = f"not all of its {len(layers)} layers are at paths that end in layers.<number>"
    if problem is not None:
        raise ValueError(f"--stages does not serve {type(model).__name__}: {problem}")


def _has_layer(names: Sequence[str], layer: int) -> bool:
    """Return whether parameters of a layer are among those of these names."""
    return any(f".layers.{layer}." in name for name in names)


def _lengthened(x: Tensor, length: int) -> Tensor:
    """Return a copy of keys or values with zeros after it."""
    return F.pad(x, (0, 0, 0, length - x.shape[2]))


# -- what rank 0 does ------------------------------------------------------------------------------


class Choice:
    """Chooses the tokens of one request, in the same way in every batch."""

    def __init__(self, request: Request) -> None:
        self._temperature = request.temperature
        self._generator = torch.Generator().manual_seed(request.seed)

    def __call__(self, logits: Tensor) -> int:
        """Return the next token, given its logits [vocabulary]."""
        if not self._temperature:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.double() / self._temperature, 0)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


@dataclass
class Answer:
    """A request that is being answered.

    Attributes:
        send: passes a token to the client.
    """

    request: Request
    send: Callable[[Token], None]
    choice: Choice
    tokens: list[int] = field(default_factory=list)


class Scheduler:
    """What rank 0 knows: which requests wait, which are answered, and for whom.

    Attributes:
        inbox: of the front: a request with its client's `send`, the number of one that its client
            has given up, or None to end.
    """

    def __init__(self, end_tokens: Sequence[int]) -> None:
        self.inbox: queue.SimpleQueue[tuple[Request, Callable[[Token], None]] | int | None] = (
            queue.SimpleQueue()
        )
        self._answers: dict[int, Answer] = {}
        self._end_tokens = set(end_tokens)
        self._done: list[int] = []
        self._is_ending = False

    def next_turn(self, batches: dict[str, Batch]) -> Turn:
        """Return what all ranks do next; wait for a request if there is nothing to do."""
        turn = Turn()
        while self._answers or not turn.admit:
            try:
                if self._answers or turn.admit:
                    entry = self.inbox.get_nowait()
                else:
                    with sm.monitor.idle():
                        entry = self.inbox.get()
            except queue.Empty:
                break
            if entry is None:
                return Turn(is_last=True)
            if isinstance(entry, int):
                if self._answers.pop(entry, None) is not None:
                    self._done.append(entry)
                continue
            request, send = entry
            self._answers[request.number] = Answer(request, send, Choice(request))
            turn.admit.append(asdict(request))
        turn.admit = [values for values in turn.admit if values["number"] in self._answers]
        turn.drop, self._done = self._done, []
        for name, batch in batches.items():
            rows = [row.number for row in batch.rows if row.number not in turn.drop]
            turn.tokens[name] = [self._answers[number].tokens[-1] for number in rows]
        return turn

    def deliver(self, logits: dict[int, Tensor]) -> None:
        """Choose the next token of each request, and send it to its client."""
        for number, row in logits.items():
            answer = self._answers[number]
            token = answer.choice(row)
            answer.tokens.append(token)
            answer.send(token)
            if token in self._end_tokens or len(answer.tokens) == answer.request.max_new_tokens:
                answer.send(None)
                del self._answers[number]
                self._done.append(number)

    def abandon(self) -> None:
        """Tell the clients that have no answer yet that there will be none."""
        sends = [answer.send for answer in self._answers.values()]
        while not self.inbox.empty():
            entry = self.inbox.get()
            if isinstance(entry, tuple):
                sends.append(entry[1])
        for send in sends:
            send(ServerEnds("the server ends"))


class Front:
    """The HTTP server of rank 0, in a thread of its own.

    Attributes:
        port: where it listens.
    """

    def __init__(self, scheduler: Scheduler, limits: Limits, host: str, port: int) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        self._scheduler, self._limits, self._numbers = scheduler, limits, itertools.count()
        app = Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/health", self._health),
            ]
        )
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
        socket = uvicorn.Config(app, host=host, port=port, log_level="error").bind_socket()
        self.port = socket.getsockname()[1]
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([socket],), name="http", daemon=True
        )
        self._thread.start()
        while (
            not self._server.started and self._thread.is_alive()
            # Until then connections are refused.
        ):
            time.sleep(0.01)

    def close(self) -> None:
        """Stop listening, after clients have been sent what they have been promised."""
        self._server.should_exit = True
        self._thread.join(5)

    async def _health(self, http_request: Any) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({"adapters": self._limits.adapters, "length": self._limits.length})

    async def _generate(self, http_request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            request, stream = parse_request(
                await http_request.body(), next(self._numbers), self._limits
            )
        except BadRequest as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        tokens = self._tokens(request)
        if stream:
            return StreamingResponse(_as_events(tokens), media_type="text/event-stream")
        try:
            return JSONResponse({"tokens": [token async for token in tokens]})
        except ServerEnds as error:
            return JSONResponse({"error": str(error)}, status_code=503)

    async def _tokens(self, request: Request) -> AsyncIterator[int]:
        """Yield the tokens of the answer as they are chosen; a client that goes away ends it."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Queue[Token]()

        def deliver(token: Token) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, token)

        self._scheduler.inbox.put((request, deliver))
        try:
            while (token := await arrived.get()) is not None:
                if isinstance(token, ServerEnds):
                    raise token
                yield token
        except (asyncio.CancelledError, GeneratorExit):
            self._scheduler.inbox.put(request.number)
            raise


async def _as_events(tokens: AsyncIterator[int]) -> AsyncIterator[str]:
    try:
        async for token in tokens:
            yield f"data: {token}\n\n"
        yield "data: end\n\n"
    except ServerEnds as error:
        yield f"data: {error}\n\n"


# -- the program -----------------------------------------------------------------------------------


def tiny_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a Llama with random weights, the same in each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            eos_token_id=2,
            initializer_range=0.2,
        )
        model: Any = transformers.LlamaForCausalLM(config)
        return model.to(dtype)


def load_model(options: argparse.Namespace, mesh: sm.DeviceMesh) -> nn.Module:
    """Return the model with the adapters, laid out over the ranks; whole, if it gets stages."""
    dtype = getattr(torch, options.dtype)
    model = (
        tiny_model(dtype)
        if options.model is None
        else transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    )
    if options.stages:
        return model.eval()
    model = sm.parallel.parallelize(model.eval(), mesh, "auto")
    for name, path in adapters_of(options).items():
        import peft

        if isinstance(model, peft.PeftModel):
            model.load_adapter(path, name)
        else:
            model = peft.PeftModel.from_pretrained(model, path, name)  # type: ignore[arg-type]
    return model.eval()


def adapters_of(options: argparse.Namespace) -> dict[str, str]:
    """Return name -> path of the adapters."""
    return dict(text.split("=", 1) for text in options.adapter)


def serve(options: argparse.Namespace) -> int:
    """Serve until rank 0 is asked to end; return how many turns there were."""
    axis = "pp" if options.stages else "tp"
    mesh = sm.init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", "1")),), axis_names=(axis,))
    model = load_model(options, mesh)
    config: Any = model.config
    forward = StagedForward(model, mesh) if options.stages else forward_of(model)
    end_tokens = (
        config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    )
    adapters = list(adapters_of(options))
    engine, scheduler, front = Engine(model, forward, adapters), Scheduler(end_tokens), None
    is_front = mesh.get_rank() == 0
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        # Sent to all ranks at once; only rank 0 decides when to end.
    ):
        signal.signal(
            number, (lambda *_: scheduler.inbox.put(None)) if is_front else signal.SIG_IGN
        )
    if is_front:
        tokenizer = (
            transformers.AutoTokenizer.from_pretrained(options.model) if options.model else None
        )
        limits = Limits(config.vocab_size, config.max_position_embeddings, adapters, tokenizer)
        front = Front(scheduler, limits, options.host, options.port)
        print(f"serving on http://{options.host}:{front.port}", flush=True)
    try:
        for step in itertools.count():
            sm.monitor.mark_step(step)
            turn = broadcast_turn(scheduler.next_turn(engine.batches) if is_front else None, mesh)
            if turn.is_last:
                break
            logits = engine.run(turn)
            if is_front:
                scheduler.deliver(logits)
    finally:
        if front is not None:
            scheduler.abandon()
            front.close()
    print(f"rank {mesh.get_rank()} has ended after {step} turns", flush=True)
    return step


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="A Hugging Face model on several ranks, over HTTP")
    parser.add_argument(
        "--model",
        help="folder or name of a Hugging Face model; by default a tiny one with random weights",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a peft adapter; may be repeated",
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one, which is printed")
    parser.add_argument("--launch", type=int, metavar="N", help="run on N local processes")
    parser.add_argument(
        "--stages",
        action="store_true",
        help="a stage of a pipeline on each rank, in place of tensor parallelism",
    )
    chosen = parser.parse_args(arguments)
    if chosen.stages and chosen.adapter:
        parser.error("--stages takes no --adapter")
    for adapter in chosen.adapter:
        if not all(adapter.partition("=")):
            parser.error(f"--adapter {adapter}: write NAME=PATH")
    if not isinstance(getattr(torch, chosen.dtype, None), torch.dtype):
        parser.error(f"--dtype {chosen.dtype}: write one of torch's, such as bfloat16")
    model = chosen.model or ""
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1  # else it may be a name
    if is_path and not os.path.isdir(model):
        parser.error(f"--model {model}: there is no such folder")
    return chosen


if __name__ == "__main__":
    chosen = options_of(sys.argv[1:])
    if "RANK" in os.environ or not chosen.launch:  # torchrun has started the ranks, or there is one
        serve(chosen)
    else:
        try:
            sm.launch(serve, chosen.launch, (chosen,))
        except (KeyboardInterrupt, SystemExit):
            print("the server has ended")
