"""The server of examples/serve.py on two processes: answers are those of one process."""

from __future__ import annotations

import copy
import http.client
import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import serve  # noqa: E402

import shardmesh as sm  # noqa: E402

# The processes import transformers first; one worker runs all tests, so that there is one
# server.
pytestmark = [pytest.mark.timeout(420), pytest.mark.xdist_group("tour")]

PROGRAM = Path(__file__).parents[2] / "examples" / "serve.py"
START_S, END_S = 240.0, 60.0
ADAPTERS = ("one", "two")
CLIENTS = 16


def adapted(seed: int) -> Any:
    """Return the example's model with an adapter that changes its answers."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "o_proj", "up_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(serve.tiny_model(torch.float64), config).double().eval()


class Server:
    """A running server; `output` is what it has printed when it has ended."""

    def __init__(self, ranks: int, *options: str) -> None:
        command = [
            sys.executable,
            str(PROGRAM),
            "--launch",
            str(ranks),
            "--port",
            "0",
            "--dtype",
            "float64",
            *options,
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.output = ""
        self.port = self._find_port()

    def _find_port(self) -> int:
        assert self.process.stdout
        deadline = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = self.process.stdout.readline()
                self.output += line
                found = re.search(r"serving on http://127.0.0.1:(\d+)", line)
                if found:
                    return int(found[1])
                if not line:
                    break
        self.kill()
        raise AssertionError(f"the server has not started:\n{self.output}")

    def post(self, body: bytes, path: str = "/generate") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        try:
            connection.request("POST", path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ask(self, **request: Any) -> list[int]:
        """Return the tokens of an answer, streamed or not."""
        status, body = self.post(json.dumps(request).encode())
        assert status == 200, body
        if not request.get("stream"):
            return json.loads(body)["tokens"]
        *events, last, rest = body.decode().split("\n\n")
        assert (last, rest) == ("data: end", "")
        return [int(event.removeprefix("data: ")) for event in events]

    def end_by(self, number: signal.Signals) -> int:
        """Send a signal to all processes, as a terminal does for Ctrl-C; return the exit status."""
        os.killpg(self.process.pid, number)
        rest, _ = self.process.communicate(timeout=END_S)
        self.output += rest
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("adapters") / name for name in ADAPTERS}
    for seed, (_, folder) in enumerate(found.items()):
        adapted(seed).save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    """Two ranks; the test of Ctrl-C, the last one, ends them."""
    started = Server(
        2,
        *(
            option
            for name, folder in folders.items()
            for option in ("--adapter", f"{name}={folder}")
        ),
    )
    yield started
    started.kill()


def requests(count: int) -> list[dict[str, Any]]:
    """Return requests of random lengths."""
    draw = random.Random(7)
    return [
        {
            "prompt": [draw.randrange(3, 128) for _ in range(draw.randrange(1, 48))],
            "max_new_tokens": draw.randrange(1, 25),
            "temperature": draw.choice([0.0, 0.0, 1.0]),
            "seed": number,
            "adapter": draw.choice(["", *ADAPTERS]),
            "stream": draw.random() < 0.5,
        }
        for number in range(count)
    ]


def answered_by_one_process(asked: list[dict[str, Any]]) -> list[list[int]]:
    """Return the answers, one request after the other: by transformers' own `generate` where
    nothing is drawn.
    """
    models = {
        "": serve.tiny_model(torch.float64).eval(),
        **{name: adapted(seed) for seed, name in enumerate(ADAPTERS)},
    }
    return [_answer(models[request["adapter"]], request) for request in asked]


@torch.inference_mode()
def _answer(model: Any, asked: dict[str, Any]) -> list[int]:
    ids, count = torch.tensor([asked["prompt"]]), asked["max_new_tokens"]
    if not asked["temperature"]:
        whole = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return whole[0, ids.shape[1] :].tolist()
    choice = serve.Choice(
        serve.Request(0, asked["prompt"], count, asked["temperature"], asked["seed"])
    )
    tokens: list[int] = []
    while len(tokens) < count and 2 not in tokens:
        tokens.append(choice(model(input_ids=ids).logits[0, -1]))
        ids = torch.tensor([[*asked["prompt"], *tokens]])
    return tokens


def check_answers(server: Server, count: int) -> None:
    asked = requests(count)
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda request: server.ask(**request), asked))
    wanted = answered_by_one_process(asked)
    assert [number for number in range(count) if answers[number] != wanted[number]] == []
    assert len({tuple(tokens) for tokens in wanted}) > count // 2


def test_answers_are_those_of_one_process(server: Server) -> None:
    check_answers(server, 12)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_hundred_requests(server: Server) -> None:
    check_answers(server, 300)


BAD = {
    b"{": "not JSON",
    b"[1]": "must be an object",
    b'{"prompt": [1], "beams": 3}': "keys among adapter",
    b'{"prompt": []}': "list of one or more token ids below 128",
    b'{"prompt": [5, 128]}': "list of one or more token ids below 128",
    b'{"prompt": [true]}': "list of one or more token ids",
    b'{"prompt": "text"}': "must be a list",
    json.dumps({"prompt": [5] * 256}).encode(): "has 256 tokens, and the model is for 256",
    b'{"prompt": [5], "max_new_tokens": 256}': "from 1 to 255",
    b'{"prompt": [5], "temperature": -1}': "from 0 to 10",
    b'{"prompt": [5], "temperature": NaN}': "from 0 to 10",
    b'{"prompt": [5], "seed": 1.5}': "integer",
    b'{"prompt": [5], "adapter": "three"}': "no adapter 'three'",
    b'{"prompt": [5], "adapter": ["one"]}': "no adapter",
    b'{"prompt": [5], "stream": 1}': "true or false",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize(("body", "text"), BAD.items(), ids=[str(body[:40]) for body in BAD])
def test_bad_requests_are_refused(body: bytes, text: str) -> None:
    with pytest.raises(serve.BadRequest, match=re.escape(text)):
        serve.parse_request(body, 0, serve.Limits(128, 256, list(ADAPTERS)))


def test_server_goes_on_after_bad_requests(server: Server) -> None:
    for body, text in BAD.items():
        status, answer = server.post(body)
        assert status == 400, body[:40]
        assert text in json.loads(answer)["error"]
    assert server.post(b"{}", "/elsewhere")[0] == 404
    assert (
        server.ask(prompt=[5, 6], max_new_tokens=2)
        == answered_by_one_process(
            [{"prompt": [5, 6], "max_new_tokens": 2, "temperature": 0.0, "adapter": ""}]
        )[0]
    )


def test_client_that_goes_away(server: Server) -> None:
    """Its row leaves the batch; the others are answered as before."""
    asked = requests(6)
    body = json.dumps(
        {"prompt": [5, 6, 7], "max_new_tokens": 250, "temperature": 1.0, "stream": True}
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with ThreadPoolExecutor(6) as clients:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
            answers = clients.map(lambda request: server.ask(**request), asked)
            assert b"200 OK" in connection.recv(100)
        assert list(answers) == answered_by_one_process(asked)


def test_sigterm_ends_all_ranks(server: Server) -> None:
    """It comes while the server is idle; `launch` waits for the ranks as long as they need."""
    assert server.end_by(signal.SIGTERM) == 0
    ended = re.findall(r"rank (\d) has ended after (\d+) turns", server.output)
    assert sorted(rank for rank, _ in ended) == ["0", "1"], server.output
    assert len({turns for _, turns in ended}) == 1
    assert "Traceback" not in server.output


@pytest.mark.slow
def test_ctrl_c_ends_the_server() -> None:
    """The ranks have five seconds to end; later `launch` kills them."""
    server = Server(2)
    try:
        assert server.end_by(signal.SIGINT) in (0, 130)
        assert "the server has ended" in server.output
        assert "Traceback" not in server.output
    finally:
        server.kill()


# -- its parts -------------------------------------------------------------------------------------


def check_rows_that_come_and_go(
    forward: serve.Forward, model: Any, precision: torch.dtype = torch.float64
) -> None:
    """Rows join and leave a batch, each with the logits of the model for its tokens alone.

    Args:
        precision: the lowest one in which the model computes.
    """
    batch = serve.Batch(forward)
    prompts = {0: [5, 6, 7], 1: [9] * 12, 2: [11, 12], 3: [13] * 5}

    def check(logits: torch.Tensor, numbers: list[int]) -> None:
        for row, number in zip(logits, numbers, strict=True):
            alone = model(torch.tensor([prompts[number]])).logits[0, -1]
            torch.testing.assert_close(row.to(precision), alone.to(precision))

    def decode(numbers: list[int]) -> None:
        for number in numbers:
            prompts[number] = [*prompts[number], 20 + number]
        check(batch.decode([20 + number for number in numbers]), numbers)

    with torch.inference_mode():
        check(batch.admit([serve.Request(n, prompts[n]) for n in (0, 1)]), [0, 1])
        decode([0, 1])
        check(batch.admit([serve.Request(2, prompts[2])]), [2])
        decode([0, 1, 2])
        batch.drop([1])
        # the padding that the long row needed is gone
        assert batch._cache[0][0].shape[2] == len(prompts[0])
        decode([0, 2])
        check(batch.admit([serve.Request(3, prompts[3])]), [3])
        batch.drop([0, 2, 3])
        prompts[4] = [30, 31]
        check(batch.admit([serve.Request(4, prompts[4])]), [4])


def test_batches_of_rows_that_come_and_go() -> None:
    """The logits of a row do not depend on the rows next to it, nor on their padding."""
    model = serve.tiny_model(torch.float64).eval()
    check_rows_that_come_and_go(serve.forward_of(model), model)


SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def llama(attention: str) -> Any:
    config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


def wide_heads() -> Any:
    """A model whose heads are wider than hidden_size / num_attention_heads."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16))


STAGED: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "sdpa": (lambda: llama("sdpa"), torch.float64),
    "eager": (lambda: llama("eager"), torch.float32),  # its softmax is always in float32
    "wide heads": (wide_heads, torch.float64),
}


@pytest.mark.parametrize(("make", "precision"), STAGED.values(), ids=STAGED)
def test_batches_over_stages(make: Callable[[], Any], precision: torch.dtype) -> None:
    """The same where each rank has a layer, and no keys and values of the other."""
    model = make().double().eval()

    def program() -> list[str]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        forward = serve.StagedForward(copy.deepcopy(model), mesh)
        check_rows_that_come_and_go(forward, model, precision)
        ids = torch.tensor([[5, 6]])
        _, cache = forward(ids, torch.ones_like(ids), torch.tensor([[0, 1]]), [])
        return [keys.device.type for keys, _ in cache]

    assert sm.simulate(2)(program)() == [["cpu", "meta"], ["meta", "cpu"]]


def mistral(window: int | None) -> Any:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=window)
    )


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4)
    )


def gemma() -> Any:
    config = transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=4)
    return transformers.Gemma2ForCausalLM(config)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "window": (
        lambda: mistral(4),
        "MistralForCausalLM: its layers attend to a sliding window of 4",
    ),
    "types": (gemma, r"Gemma2ForCausalLM: it has layers of the types \['sliding_attention'\]"),
    "heads": (gpt2, "GPT2LMHeadModel: its config has no num_key_value_heads"),
}


@pytest.mark.usefixtures("one_rank_job")
@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
def test_models_that_stages_do_not_serve(make: Callable[[], Any], text: str) -> None:
    mesh = sm.init_device_mesh("cpu", (1,), axis_names=("pp",))
    with pytest.raises(ValueError, match=text):
        serve.StagedForward(make(), mesh)


@pytest.mark.usefixtures("one_rank_job")
def test_model_without_a_path_of_layers() -> None:
    model = llama("sdpa")
    model.model.blocks = model.model.layers
    del model.model.layers
    with pytest.raises(ValueError, match="not all of its 2 layers are at paths"):
        serve.StagedForward(model, sm.init_device_mesh("cpu", (1,), axis_names=("pp",)))


@pytest.mark.usefixtures("one_rank_job")
def test_layers_of_which_none_has_a_window() -> None:
    """A window of the config that no layer uses."""
    mesh = sm.init_device_mesh("cpu", (1,), axis_names=("pp",))
    config = transformers.Qwen2Config(**SIZES, sliding_window=4, use_sliding_window=False)
    for model in (mistral(None), transformers.Qwen2ForCausalLM(config)):
        serve.StagedForward(model, mesh)


@pytest.mark.slow
def test_answers_of_a_server_with_stages() -> None:
    server = Server(2, "--stages")
    try:
        asked = [{**request, "adapter": ""} for request in requests(20)]
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = list(clients.map(lambda request: server.ask(**request), asked))
        assert answers == answered_by_one_process(asked)
        assert server.end_by(signal.SIGTERM) == 0
        assert "Traceback" not in server.output
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter", "fr"], "--adapter fr: write NAME=PATH"),
        (["--adapter", "=path"], "--adapter =path: write NAME=PATH"),
        (["--dtype", "bf16"], "--dtype bf16: write one of torch's, such as bfloat16"),
        (["--model", "path/to/llama"], "--model path/to/llama: there is no such folder"),
        (["--model", "./llama"], "--model ./llama: there is no such folder"),
    ],
)
def test_wrong_options_end_the_command(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.options_of(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert serve.options_of(["--model", "owner/name"]).model == "owner/name"
