"""Images through the whole engine: logits against transformers, hits at and inside images, and what is not encoded."""

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from transformers import AutoImageProcessor, Qwen3_5ForConditionalGeneration
from transformers.utils import logging as transformers_logging

from cairn.engine.build import build_core
from cairn.engine.contract import EngineConfig, Pixels
from cairn.engine.text.tokenizer import ModelTokenizer
from cairn.errors import InvalidRequest
from cairn.scheduler.speculation import SpeculativeConfig
from cairn.types import SamplingParams
from doubles.drafters import KnowingDrafter, KnowingHead, LeftToTheHead
from doubles.engine_requests import generate_request
from tiers import first_of, more

torch.set_num_threads(1)


class Asker:
    """One core, asked one request at a time."""

    def __init__(self, folder, **config):
        self.logits = []
        settings = {"kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 4} | config
        self.core = build_core(EngineConfig(model=str(folder), **settings), observe=self._observe)
        self.tokenizer = ModelTokenizer(folder)
        self._numbers = itertools.count()

    def _observe(self, sample, logits):
        self.logits.append(logits.clone())

    def request(self, *parts, max_tokens=1, salt=None):
        rendered = self.tokenizer.render_chat([{"role": "user", "content": list(parts)}])
        return generate_request(
            request_id=str(next(self._numbers)),
            prompt=np.array(rendered.token_ids, dtype="<i8").tobytes(),
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            boundaries=rendered.boundaries,
            images=rendered.images,
            cache_salt=salt,
        )

    def ask(self, *parts, **options):
        """The answer's tokens, the cache's report, and the logits of each."""
        return self.run(self.request(*parts, **options))

    def run(self, request):
        self.logits.clear()
        self.core.submit(request)
        tokens, report = [], None
        while self.core.has_work:
            for output in self.core.step():
                assert output.error is None, output.error
                tokens += output.token_ids
                report = output.cache or report
        self.core.idle()
        return tokens, report, torch.stack(self.logits)

    @property
    def encoded(self):
        return self.core.stats().images.num_encoded


def pixels(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image(*size, seed=0):
    array = pixels(*size, seed=seed)
    return {"type": "image", "image": Pixels(width=size[0], height=size[1], rgb=array.tobytes())}


def text(value):
    return {"type": "text", "text": value}


LONG = "def mean(values):\n    return sum(values) / len(values)\n\n" * 6


@pytest.fixture(scope="module")
def reference(tiny_vl_model):
    """Logits of the last `count` tokens, by transformers' model in the given dtype."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    models = {
        dtype: Qwen3_5ForConditionalGeneration.from_pretrained(tiny_vl_model, dtype=dtype).train(False)
        for dtype in (torch.float32, torch.float64)
    }
    processor = AutoImageProcessor.from_pretrained(tiny_vl_model, backend="pil", local_files_only=True)

    def logits(dtype, tokens, images, count):
        inputs = {"input_ids": torch.tensor([tokens])}
        if images:
            made = processor(images=images, return_tensors="pt")
            inputs["pixel_values"] = made["pixel_values"].to(dtype)
            inputs["image_grid_thw"] = made["image_grid_thw"]
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == models[dtype].config.image_token_id).long()
        with torch.no_grad():
            return models[dtype](**inputs, use_cache=False).logits[0, -count:]

    yield logits
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity(verbosity)


def close_to(reference, request, tokens, own):
    """cairn's float32 error is at most twice that of transformers, and 1e-6."""
    images = [
        Image.fromarray(np.frombuffer(found.rgb, np.uint8).reshape(found.height, found.width, 3))
        for found in request.images
    ]
    fed = [*np.frombuffer(request.prompt, "<i8").tolist(), *tokens[:-1]]
    exact = reference(torch.float64, fed, images, len(tokens))
    theirs = (reference(torch.float32, fed, images, len(tokens)).double() - exact).abs().max()
    worst = (own.double() - exact).abs().max()
    assert worst <= 2 * theirs + 1e-6, (float(worst), float(theirs))


CHATS = {
    "one": [image(200, 120), text("What is this?")],
    "text first": [text(LONG), image(200, 120, seed=1), text("What is this?")],
    "between": [image(96, 160), text(LONG), image(300, 200, seed=2), text(LONG)],
    "side by side": [image(96, 160), image(250, 250, seed=1), image(64, 64, seed=2), text("Compare.")],
    "text alone": [text(LONG), text("What is this?")],
}


@pytest.mark.parametrize(
    ("name", "budget"),
    first_of([("side by side", 72), ("text alone", 72), ("between", 72), ("one", 2048)], CHATS, (72, 136, 2048)),
)
def test_logits_are_those_of_transformers(tiny_vl_model, reference, name, budget):
    """Prompts are cut before, inside, between and after images: every 64 tokens with the smallest budget."""
    asker = Asker(tiny_vl_model, max_num_batched_tokens=budget)
    request = asker.request(*CHATS[name], max_tokens=4)
    tokens, _, own = asker.run(request)
    close_to(reference, request, tokens, own)


def test_logits_behind_a_hit_anywhere(tiny_vl_model, reference):
    """A prompt continued from before, between, after and inside images, after a hit on every kind of place."""
    first = [text("See:"), image(320, 300), text("and"), image(200, 300, seed=1)]
    asker = Asker(tiny_vl_model)
    request = asker.request(*first, text(LONG), max_tokens=4)
    asker.run(request)
    places = {}
    other = image(200, 200, seed=7)
    for name, parts in {
        "whole": [*first, text(LONG)],
        "after the second": [*first, text("Now what?"), text(LONG)],
        "after the first": [*first[:2], text("but"), other],
        "inside text": [*first, text(LONG[:200] + "?")],
    }.items():
        again = asker.request(*parts, max_tokens=4)
        tokens, report, own = asker.run(again)
        close_to(reference, again, tokens, own)
        places[name] = report.cached_tokens
    one, two = request.images
    assert places["whole"] == len(request.prompt) // 8
    assert places["after the second"] >= two.start + two.length
    assert places["after the first"] >= one.start + one.length


@pytest.mark.parametrize("budget", [72, more(2048)])
def test_hits_inside_an_image(tiny_vl_model, reference, budget):
    """Where no end is announced the grid's checkpoints remain, and the last that is shared lies inside the image."""
    asker = Asker(tiny_vl_model, max_num_batched_tokens=budget)
    large = image(640, 640)
    request = replace(asker.request(large, text("a"), max_tokens=2), boundaries=[])
    asker.run(request)
    again = replace(asker.request(large, text("b"), max_tokens=2), boundaries=[])
    tokens, report, own = asker.run(again)
    (found,) = request.images
    assert found.start < report.cached_tokens < found.start + found.length <= report.matched_tokens
    close_to(reference, again, tokens, own)
    assert asker.encoded == 1


# -- hits ------------------------------------------------------------------------------------------------------------


def test_incremental_images_hit_all_that_they_share(tiny_vl_model):
    asker = Asker(tiny_vl_model)
    four = [image(320, 320, seed=seed) for seed in range(4)]
    tail = text("Compare them. " * 100)
    request = asker.request(*four, tail)
    rounds = []

    def ask(*parts):
        before = asker.core.stats().steps.forward_passes
        tokens, report, _ = asker.ask(*parts, max_tokens=2)
        rounds.append(asker.core.stats().steps.forward_passes - before)
        return tokens, report

    cold, report = ask(*four, tail)
    assert report.cached_tokens == 0 and asker.encoded == 4
    again, report = ask(*four, tail)
    assert report.cached_tokens == report.prompt_tokens and again == cold and asker.encoded == 4
    more, report = ask(*four, image(320, 320, seed=4), tail)
    last = request.images[3]
    assert report.cached_tokens == last.start + last.length + 1 and asker.encoded == 5
    _, report = ask(*four, image(320, 320, seed=4), tail)
    assert report.cached_tokens == report.prompt_tokens and asker.encoded == 5
    without = Asker(tiny_vl_model, enable_prefix_caching=False)
    tokens, report, _ = without.ask(*four, image(320, 320, seed=4), tail, max_tokens=2)
    assert tokens == more
    # a full hit needs no pass for its first token
    assert rounds == [2, 1, 2, 1] and without.core.stats().steps.forward_passes == 2


def test_identity_decides(tiny_vl_model):
    asker = Asker(tiny_vl_model)
    question = text("What is this? " * 20)
    first = image(128, 256, seed=1)
    asker.ask(first, question)
    turned = {"type": "image", "image": Pixels(width=256, height=128, rgb=first["image"].rgb)}
    for other, shared in ((image(128, 256, seed=2), False), (turned, False), (image(128, 256, seed=1), True)):
        _, report, _ = asker.ask(other, question)
        assert (report.cached_tokens > 20) == shared, report
    assert asker.encoded == 3


def test_a_salt_keeps_prompts_apart_and_shares_encodings(tiny_vl_model):
    asker = Asker(tiny_vl_model)
    parts = [image(128, 128), text("What is this? " * 20)]
    asker.ask(*parts, salt="one")
    _, report, _ = asker.ask(*parts, salt="two")
    assert report.cached_tokens == 0 and asker.encoded == 1


def test_an_image_whose_vectors_were_dropped_is_encoded_again(tiny_vl_model, reference):
    asker = Asker(tiny_vl_model, mm_encoder_cache_bytes=0, max_num_batched_tokens=72)
    request = asker.request(image(320, 320), text("a"), max_tokens=2)
    tokens, _, own = asker.run(request)
    close_to(reference, request, tokens, own)
    assert asker.encoded > 1
    kept = Asker(tiny_vl_model, max_num_batched_tokens=72)
    kept.run(kept.request(image(320, 320), text("a")))
    assert (
        kept.encoded == 1
        and kept.core.stats().images.num_hits >= 1
        and kept.core.stats().images.num_bytes == 100 * 256 * 4
    )


def test_text_hits_the_same_with_and_without_the_tower(tiny_vl_model):
    askers = [Asker(tiny_vl_model), Asker(tiny_vl_model, language_model_only=True)]
    assert [asker.core.info.reads_images for asker in askers] == [True, False]
    for tail in ("a", "a", "b", LONG, LONG + "c"):
        (one, two) = [asker.ask(text(LONG), text(tail), max_tokens=3) for asker in askers]
        assert one[:2] == two[:2] and torch.equal(one[2], two[2])
    with pytest.raises(InvalidRequest, match="reads no images"):
        askers[1].ask(image(64, 64))


def test_images_have_no_log_probabilities_and_a_text_on_the_same_model_has(tiny_vl_model):
    asker = Asker(tiny_vl_model)
    for shown in (0, 2):
        pictured = replace(asker.request(image(64, 64), text("a")), prompt_logprobs=shown)
        with pytest.raises(InvalidRequest, match="has images") as refused:
            asker.run(pictured)
        assert refused.value.param == "prompt_logprobs"
    asker.run(replace(asker.request(text("a")), prompt_logprobs=2))
    # what looks at the prompt's tokens otherwise passes images over
    penalized = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    request = asker.request(image(64, 64), text("a"), max_tokens=3)
    asker.run(replace(request, sampling=penalized, logprobs=2))


def test_requests_with_and_without_images_at_once(tiny_vl_model):
    """Positions and vectors are each request's own: together they answer as alone, in float32 up to rounding, in exact
    mode bit for bit."""
    chats = [CHATS["between"], CHATS["text alone"], CHATS["side by side"], CHATS["one"]]
    alone = Asker(tiny_vl_model, exact=True, enable_prefix_caching=False)
    expected = [alone.ask(*parts, max_tokens=5)[0] for parts in chats]
    together = Asker(tiny_vl_model, exact=True, enable_prefix_caching=False, max_num_batched_tokens=200)
    requests = [together.request(*parts, max_tokens=5) for parts in chats]
    for request in requests:
        together.core.submit(request)
    answers = {request.request_id: [] for request in requests}
    while together.core.has_work:
        for output in together.core.step():
            answers[output.request_id] += output.token_ids
    assert list(answers.values()) == expected


def test_cached_is_uncached_bit_for_bit_in_exact_mode(tiny_vl_model):
    chats = [CHATS["between"], CHATS["side by side"]]
    cached = Asker(tiny_vl_model, exact=True, max_num_batched_tokens=136)
    uncached = Asker(tiny_vl_model, exact=True, enable_prefix_caching=False)
    hits = 0
    for parts in [*chats, *chats, [*chats[1][:3], text("Other.")], [*chats[0][:3], text("Other.")]]:
        tokens, report, own = cached.ask(*parts, max_tokens=4)
        expected, _, theirs = uncached.ask(*parts, max_tokens=4)
        assert tokens == expected and torch.equal(own, theirs)
        hits += report.cached_tokens > 0
    assert hits == 4


@pytest.mark.parametrize("enforce_eager", [False, more(True)])
def test_drafts_after_images_change_nothing(tiny_vl_model, enforce_eager):
    """A row after images has three positions of its own, also where it verifies drafts: recorded passes and others."""
    parts = [image(96, 64, seed=3), text(LONG), image(64, 96, seed=4), text("and what is this?")]
    options = {"exact": True, "enforce_eager": enforce_eager}
    plain = Asker(tiny_vl_model, speculative=SpeculativeConfig(method="none"), **options)
    expected, _, wanted = plain.ask(*parts, max_tokens=24)
    drafted = Asker(tiny_vl_model, **options)
    drafter = KnowingDrafter({}, 5, lambda proposal: [99, 2, 0][proposal % 3], 3000)
    drafted.core._scheduler.state.drafting.drafter = drafter
    for number in range(3):
        drafter._answers[str(number)] = expected
        tokens, _, found = drafted.ask(*parts, max_tokens=24)
        assert tokens == expected and torch.equal(found, wanted)
    assert sum(accepted for _, _, accepted in drafter.records) > 20


@pytest.mark.parametrize("enforce_eager", [False, more(True)])
def test_a_head_drafts_after_images(made_model, enforce_eager):
    """Also where the prompt ends within an image's tokens, whose next one has another position for the head."""
    folder, options = made_model("qwen3_5_vl+mtp"), {"exact": True, "enforce_eager": enforce_eager}
    plain = Asker(folder, speculative=SpeculativeConfig(method="none"), **options)
    headed = Asker(folder, speculative=SpeculativeConfig(method="mtp"), **options)
    head = KnowingHead({}, 5, lambda proposal: [99, 2, 0][proposal % 3], 3000, headed.core._runner)
    headed.core._scheduler.state.drafting.drafter = head
    for number, parts in enumerate(
        [[image(96, 64, seed=3), text("what is this?")], [text("a"), image(64, 96, seed=4)]]
    ):
        request = plain.request(*parts, max_tokens=20)
        if number:
            (shown,) = request.images
            request = replace(request, prompt=request.prompt[: 8 * (shown.start + shown.length)], boundaries=())
        expected, _, wanted = plain.run(request)
        for name in (f"{number}-cold", f"{number}-hit"):
            head._answers[name] = expected
            tokens, _, found = headed.run(replace(request, request_id=name))
            assert tokens == expected and torch.equal(found, wanted)
    assert sum(accepted for _, _, accepted in head.records) > 20 and head.num_made > 40


@pytest.mark.long
def test_images_on_two_ranks(tiny_vl_model, reference):
    """Rank 0 encodes, the other takes the vectors from there."""
    asker = Asker(tiny_vl_model, tensor_parallel_size=2, max_num_batched_tokens=136)
    try:
        for _ in range(2):
            request = asker.request(*CHATS["between"], max_tokens=4)
            tokens, report, own = asker.run(request)
            close_to(reference, request, tokens, own)
            assert asker.encoded == 2
        assert report.cached_tokens == report.prompt_tokens
    finally:
        asker.core.close()


@pytest.mark.long
def test_a_head_drafts_after_images_on_two_ranks(made_model):
    """By the same positions on both: one that drafted other tokens would spoil what both compute of them."""
    shared = {"exact": True, "tensor_parallel_size": 2}
    plain, headed = (
        Asker(made_model("qwen3_5_vl+mtp"), speculative=SpeculativeConfig(method=method), **shared)
        for method in ("none", "mtp")
    )
    try:
        headed.core._scheduler.state.drafting.drafter = LeftToTheHead(4)
        for parts in ([image(96, 64, seed=3), text("what is this?")], [text("a"), image(64, 96, seed=4)]):
            expected, _, wanted = plain.ask(*parts, max_tokens=12)
            for _ in range(2):
                tokens, _, logits = headed.ask(*parts, max_tokens=12)
                assert tokens == expected and torch.equal(logits, wanted)
        assert headed.core.stats().spec_decode.num_draft_tokens > 40
    finally:
        plain.core.close()
        headed.core.close()
