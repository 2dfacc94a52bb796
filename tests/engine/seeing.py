"""Engines that read images, and plain transformers with PEFT to compare them with."""

import numpy as np
import torch
from torch.func import functional_call
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from lorimer.engine.engine import Engine
from lorimer.engine.messages import CreateRun, Datum, Done, ImageInput, LoraConfig, SampleRequest, SamplingParams
from tests.engine.debug_vision import IMAGE_TOKEN, VISION_VOCAB_SIZE, make_debug_vision_model
from tests.engine.operations import settings
from tests.engine.pictures import file_of, picture
from tests.engine.reference import MergedReference, PeftReference, literal_loss

RUN = "run"


def open_engine(directory, **more):
    return Engine(settings(directory, model=str(directory), **more))


def make_directory(directory, architecture):
    make_debug_vision_model(directory, architecture=architecture)
    return directory


def create_run(engine, seed=0, **flags):
    """A run whose B is not zero, so that every gradient is alive."""
    engine.create_run(CreateRun(request_id="c", model_id=RUN, lora=LoraConfig(rank=4, seed=seed, **flags)))
    adapter = engine._run(RUN)
    generator = torch.Generator().manual_seed(seed + 1)
    for _, b in adapter.weights.values():
        b.normal_(0, 0.05, generator=generator)
    return adapter


def numbered_picture(number):
    """The number decides the size, too."""
    width, height = ((24, 40), (33, 17), (16, 16), (50, 20))[number % 4]
    return picture(width, height, number)


class Mixed:
    """A sequence of text and pictures: numbers say how many tokens of text, strings hold the number of a picture."""

    def __init__(self, *parts, seed=0):
        rng = np.random.default_rng(seed)
        self.parts = [part if isinstance(part, str) else rng.integers(3, 259, part) for part in parts]

    @property
    def text(self):
        return np.concatenate([np.empty(0, np.int64), *(part for part in self.parts if not isinstance(part, str))])

    @property
    def seeds(self):
        return [int(part) for part in self.parts if isinstance(part, str)]

    @property
    def images(self):
        """As the engine is sent them."""
        found, offset = [], 0
        for chunk, part in enumerate(self.parts):
            if isinstance(part, str):
                data = file_of(numbered_picture(int(part)))
                found.append(ImageInput(data=data, format="png", offset=offset, chunk=chunk))
            else:
                offset += len(part)
        return found

    def inputs(self, directory, more=()):
        """As transformers is given them, with ``more`` tokens at the end."""
        processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        prepared, counts = {}, []
        if self.seeds:
            prepared = dict(processor([numbered_picture(seed) for seed in self.seeds], return_tensors="pt"))
            grids = prepared.get("image_grid_thw")
            counts = [16] * len(self.seeds) if grids is None else (grids.prod(-1) // 4).tolist()
        left = iter(counts)
        pieces = [np.full(next(left), IMAGE_TOKEN) if isinstance(part, str) else part for part in self.parts]
        tokens = torch.from_numpy(np.concatenate([*pieces, np.asarray(more, np.int64)]))[None]
        if "image_grid_thw" in prepared:
            prepared["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).long()
        return {"input_ids": tokens, **prepared}

    def length(self, directory):
        return self.inputs(directory)["input_ids"].shape[1]

    def datum(self, directory, seed=0):
        rng, length = np.random.default_rng(seed + 100), self.length(directory)
        inputs = {
            "target_tokens": rng.integers(0, VISION_VOCAB_SIZE, length),
            "weights": (rng.normal(size=length) * (rng.random(length) < 0.7)).astype(np.float32),
        }
        return Datum(tokens=self.text, loss_fn_inputs=inputs, images=self.images)

    def sample(self, request_id="s", max_tokens=1, seed=1, temperature=1.0, **more):
        params = SamplingParams(max_tokens=max_tokens, seed=seed, stop=[], temperature=temperature)
        return SampleRequest(request_id=request_id, prompt=self.text, images=self.images, params=params, **more)


def plain_model(directory):
    model = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    )
    return model.requires_grad_(False).eval()


class SeeingReference(PeftReference):
    """Logits of all that a sequence has, text and pictures, by the model's own forward."""

    def logits(self, inputs):
        return self.model(**inputs, use_cache=False).logits[0]


class SeeingMergedReference(MergedReference):
    """The same where PEFT has no form for the adapter: experts."""

    def logits(self, inputs):
        return functional_call(self.model, self.merged(), (), inputs, tie_weights=False).logits[0]


def reference_of(directory, engine, adapter):
    has_experts = any(target.num_experts for target in engine.model.targets)
    kind = SeeingMergedReference if has_experts else SeeingReference
    return kind(plain_model(directory), engine.model, adapter)


def run_reference(reference, directory, sequences, data):
    """Loss, log probabilities and gradients, one sequence at a time."""
    total, logprobs = 0.0, []
    for sequence, datum in zip(sequences, data, strict=True):
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
        chosen = reference.logits(sequence.inputs(directory)).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        loss = literal_loss("cross_entropy", chosen, datum)
        loss.backward()
        total += loss.item()
        logprobs.append(chosen.detach().numpy())
    return total, logprobs, reference.gradients()


def finish(engine, *requests):
    """Results by request."""
    for request in requests:
        engine.add_sample(request)
    done = {}
    while not engine.sampler.is_idle:
        for reply in engine.sampler.step():
            assert isinstance(reply, Done), reply
            done[reply.request_id] = reply.result
    return done
