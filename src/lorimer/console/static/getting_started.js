// Commands for empty pages, with this server's URL.

const server = () => location.origin;

/** A minimal training program that makes a run appear here. */
export const trainingProgram = (model = "lorimer/tiny") => `import lorimer

training = lorimer.ServiceClient(base_url="${server()}").create_lora_training_client("${model}", rank=8)
tokens = training.get_tokenizer().encode("My favourite colour is green, of course.")
datum = lorimer.Datum(lorimer.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
for step in range(60):
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(lorimer.AdamParams(learning_rate=2e-3)).result()`;

/** The same for scripts written for the official SDK. */
export const officialEnvironment = () => `export TINKER_BASE_URL=${server()}
export TINKER_API_KEY=tml-...`;

export const saveProgram = () => `training.save_state("step-60").result()                # to go on training from
training.save_weights_for_sampler("step-60").result()  # to sample from`;

export const rolloutsProgram = () => `turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
training.log_rollouts([{"turns": turns, "reward": 1.0, "group": "sums"}], step=1)`;

export const metricsProgram = () => `training.log_metrics({"reward": 0.5}, step=1)`;
