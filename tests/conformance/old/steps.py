"""What a program does with an older release of the SDK, in 24 steps; runs by itself, in an environment of that release.

Knows nothing of this repository: it takes its server and key from the environment and the model from its argument, and
prints the number of steps that it passed. Only what the release has is asked of it.
"""

import io
import os
import sys
import tarfile
import urllib.request
from typing import Any

import numpy as np
import tinker
from tinker import types

MODEL = sys.argv[1]
RELEASE = tuple(int(part) for part in tinker.__version__.split("."))
TOKENS = [17, 42, 99, 123, 200, 7, 55, 81]
ADAM = types.AdamParams(learning_rate=1e-2)

steps = 0


def passed(is_right: object, what: str) -> None:
    """Count a step, or end with its name."""
    global steps
    steps += 1
    if not is_right:
        sys.exit(f"step {steps} failed with {tinker.__version__}: {what}")


def close(left: object, right: object, tolerance: float = 1e-4) -> bool:
    return bool(np.allclose(np.asarray(left, float), np.asarray(right, float), atol=tolerance))


def tensor(values: object, dtype: str) -> types.TensorData:
    array = np.asarray(values)
    return types.TensorData(data=array.ravel().tolist(), dtype=dtype, shape=list(array.shape))


def datum(**inputs: list[float]) -> types.Datum:
    floats = {name: tensor(values, "float32") for name, values in inputs.items()}
    targets = {"target_tokens": tensor(TOKENS[1:], "int64")}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=targets | floats)


PLAIN = [datum(weights=[1.0, 0.5, 0.0, 1.0, -0.5, 1.0, 2.0])]
WEIGHTS = np.array([1.0, 0.5, 0.0, 1.0, -0.5, 1.0, 2.0])


def logprobs(output: types.ForwardBackwardOutput) -> np.ndarray:
    return np.asarray(output.loss_fn_outputs[0]["logprobs"].tolist())


def now(trainer: tinker.TrainingClient) -> np.ndarray:
    return logprobs(trainer.forward(PLAIN, "cross_entropy").result())


def train(trainer: tinker.TrainingClient) -> None:
    future = trainer.forward_backward(PLAIN, "cross_entropy")
    trainer.optim_step(ADAM).result()
    future.result()


def half_square(data: list, outputs: list) -> tuple:
    return 0.5 * (outputs[0] + 1).square().sum(), {"custom": 3.0}


def check_training(trainer: tinker.TrainingClient) -> None:
    info = trainer.get_info()
    passed((info.model_name, info.lora_rank) == (MODEL, 4), "get_info")
    first = now(trainer)
    passed(first.shape == (7,), "forward")
    output = trainer.forward_backward(PLAIN, "cross_entropy").result()
    passed(close(logprobs(output), first), "forward_backward gives the logprobs of forward")
    passed(close(output.metrics["loss:sum"], -(WEIGHTS * first).sum()), "cross_entropy is the weighted sum")
    trainer.optim_step(ADAM).result()
    passed(not close(now(trainer), first, 1e-3), "optim_step")
    check_losses(trainer)
    picture = types.Datum(
        model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=7)]),
        loss_fn_inputs=PLAIN[0].loss_fn_inputs,
    )
    try:
        trainer.forward_backward([picture], "cross_entropy").result()
        passed(False, "an image is refused")
    except tinker.BadRequestError as refused:
        passed("image" in str(refused), "an image is refused by name")
    many = trainer.forward_backward(PLAIN * 1030, "cross_entropy").result()
    passed(len(many.loss_fn_outputs) == 1030, "a call of two chunks")
    trainer.optim_step(ADAM).result()


def check_losses(trainer: tinker.TrainingClient) -> None:
    before = now(trainer)
    advantages = [1.0, -1.0, 0.5, 2.0, -0.5, 1.0, 0.0]
    policy = [datum(logprobs=(before - 0.3).tolist(), advantages=advantages)]
    ratio, gain = np.exp(0.3), np.asarray(advantages)
    expected = -np.minimum(ratio * gain, 1.2 * gain).sum()
    output = trainer.forward_backward(policy, "ppo").result()
    passed(close(output.metrics["loss:sum"], expected, 1e-2), "ppo")
    trainer.optim_step(ADAM).result()
    path = trainer.save_state("before-custom").result().path
    linear = [datum(weights=(-(now(trainer) + 1)).tolist())]
    custom = trainer.forward_backward_custom(PLAIN, half_square).result()
    passed(custom.metrics["custom"] == 3.0, "the metrics of a custom loss")
    trainer.optim_step(ADAM).result()
    after = now(trainer)
    trainer.load_state_with_optimizer(path).result()
    trainer.forward_backward(linear, "cross_entropy").result()
    trainer.optim_step(ADAM).result()
    passed(close(now(trainer), after), "the gradient of a custom loss is that of its linear form")


def check_checkpoints(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> str:
    saved = now(trainer)
    path = trainer.save_state("state").result().path
    passed(path == f"tinker://{trainer.model_id}/weights/state", "save_state")
    train(trainer)
    further = now(trainer)
    trainer.load_state_with_optimizer(path).result()
    passed(close(now(trainer), saved), "load_state_with_optimizer")
    train(trainer)
    passed(close(now(trainer), further), "the step after loading is the same")
    trainer.load_state(path).result()
    resumed = service.create_training_client_from_state(path)
    passed(close(now(resumed), saved), "create_training_client_from_state")
    continued = service.create_training_client_from_state_with_optimizer(path)
    train(continued)
    passed(close(now(continued), further), "create_training_client_from_state_with_optimizer")
    return path


def check_sampling(service: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    expected, prompt = now(trainer), types.ModelInput.from_ints(TOKENS)
    named = trainer.save_weights_for_sampler("sampler").result().path
    clients = [
        service.create_sampling_client(model_path=named),
        trainer.save_weights_and_get_sampling_client("ephemeral"),
    ]
    for client in clients:
        scores = client.compute_logprobs(prompt).result()
        passed(scores[0] is None and close(scores[1:], expected), "the logprobs of a sampler are the trainer's")
    params = types.SamplingParams(max_tokens=4, seed=3, stop=["never to be seen"], temperature=0.7)
    arguments = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    first, second = (clients[0].sample(prompt, 2, params, **arguments).result() for _ in range(2))
    passed([one.tokens for one in first.sequences] == [one.tokens for one in second.sequences], "a seed repeats")
    passed(all(len(one.logprobs) == len(one.tokens) <= 4 for one in first.sequences), "logprobs of samples")
    passed(close(first.prompt_logprobs[1:], expected), "prompt logprobs of a sample")
    passed([len(row) for row in first.topk_prompt_logprobs[1:]] == [2] * 7, "top-k of a prompt")
    futures = [clients[1].sample(prompt, 1, types.SamplingParams(max_tokens=2)) for _ in range(20)]
    passed(all(future.result().sequences for future in futures), "twenty samples together")
    base = service.create_sampling_client(base_model=MODEL)
    passed(not close(base.compute_logprobs(prompt).result()[1:], expected, 1e-3), "the base model")


def check_lists(rest: Any, trainer: tinker.TrainingClient, path: str) -> None:
    passed(rest.get_training_run(trainer.model_id).result().lora_rank == 4, "get_training_run")
    runs = rest.list_training_runs(limit=100).result().training_runs
    passed(trainer.model_id in [run.training_run_id for run in runs], "list_training_runs")
    found = rest.list_checkpoints(trainer.model_id).result().checkpoints
    passed({one.checkpoint_type for one in found} == {"training", "sampler"}, "list_checkpoints")
    everything = rest.list_user_checkpoints(limit=1000).result().checkpoints
    knows_exports = RELEASE >= (0, 28, 0)
    passed(knows_exports == any(one.checkpoint_type == "external" for one in everything), "list_user_checkpoints")
    address = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    with (
        urllib.request.urlopen(address, timeout=30) as answer,
        tarfile.open(fileobj=io.BytesIO(answer.read())) as archive,
    ):
        passed("adapter_model.safetensors" in archive.getnames(), "the archive of a checkpoint")
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(trainer.model_id).result().checkpoints
    passed(path not in [one.tinker_path for one in left], "delete_checkpoint")


def main() -> None:
    service = tinker.ServiceClient(api_key=os.environ["TINKER_API_KEY"])
    models = service.get_server_capabilities().supported_models
    passed(MODEL in [model.model_name for model in models], "get_server_capabilities")
    trainer = service.create_lora_training_client(MODEL, rank=4, seed=1)
    check_training(trainer)
    path = check_checkpoints(service, trainer)
    check_sampling(service, trainer)
    check_lists(service.create_rest_client(), trainer, path)
    print(steps)  # noqa: T201


if __name__ == "__main__":
    main()
