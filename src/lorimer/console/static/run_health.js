// What went wrong in a run as its program noticed it (metrics `health/NAME`), with what to do. The checks and their
// limits are in cookbook/run_health.py; the charts have the numbers.

import { h, short } from "./dom.js";

const PREFIX = "health/";

/** What is seen, and what to do, by the name of a check. */
export const CONCERNS = {
  no_signal: [
    "Nothing was learned for three steps or more: no group had answers with different rewards.",
    "Read the rollouts. Look at the grader, the form of answers that it accepts, how hard the problems are, max_tokens and the size of the groups.",
  ],
  few_mixed_groups: [
    "Few groups had different rewards; the others teach nothing.",
    "If most are all wrong, begin with SFT or easier questions; if most are all right, it is solved. A larger group_size gives more mixed groups.",
  ],
  entropy_collapse: [
    "Entropy collapsed: the samples of a group become the same.",
    "Lower the learning rate, go back to an earlier checkpoint, or set kl_penalty_coef.",
  ],
  divergence: [
    "The reward fell while entropy rose.",
    "The learning rate is too high: resume from an earlier checkpoint with a third of it, or with warmup_steps.",
  ],
  policy_drift: [
    "Updates are too far off-policy: the trained model is no longer what was sampled from.",
    "Use fewer num_substeps, a smaller max_steps_off_policy, or a lower learning rate.",
  ],
  reference_drift: [
    "The policy jumped away from its reference.",
    "Lower the learning rate, or raise kl_penalty_coef; the reward often falls soon after.",
  ],
  truncation: [
    "Many answers were cut off by max_tokens, so that rewards are noise.",
    "Raise max_tokens, or reward brevity; if answers do not end at all, check the renderer.",
  ],
  length_reward: [
    "Answers grow longer without being better, or the reward follows their length.",
    "Read long rollouts: if they are not better, the grader rewards length by accident.",
  ],
  grader_errors: [
    "The grader often failed; each failure is graded 0.",
    "The rollouts with errors have the reason; raise grader_seconds if it is a timeout.",
  ],
  malformed: [
    "Many answers had no proper end.",
    "Check max_tokens, the stop sequences and the renderer first, then lower the learning rate.",
  ],
  skipped_steps: [
    "A gradient or loss was not finite, and the step was skipped.",
    "Lower the learning rate, set grad_clip_norm to 1, and look at the examples of the step.",
  ],
  loss_spike: [
    "The loss of a step was far above those before it.",
    "One spike may be odd examples in the batch; if more follow, lower the learning rate or set grad_clip_norm to 1.",
  ],
  loss_above_start: [
    "The loss is above that of the first steps.",
    "The learning rate is too high: begin again with a tenth of it, in another log directory.",
  ],
  overfitting: [
    "The held-out loss rose while the training loss fell: rows are memorised.",
    "Take the checkpoint of the best value (save_every, keep), train fewer epochs, or with more rows.",
  ],
  learning_rate: [
    "The learning rate is far from what the rule gives for the model.",
    "Unless you have measured that it fits, take the rule's; the recipe sweep compares some.",
  ],
};

/** Build the list of what went wrong in a run, or nothing. */
export function runHealth({ metrics }) {
  const marks = metrics.filter(({ name, last }) => name.startsWith(PREFIX) && last !== null);
  if (!marks.length) return null;
  const latest = marks.sort((a, b) => b.last_step - a.last_step);
  return h("ul", { class: "run-health", "aria-label": "What went wrong" }, latest.map(concern));
}

function concern({ name, min_step: first, last_step: last }) {
  const [seen, advice] = CONCERNS[name.slice(PREFIX.length)] ?? [];
  const steps = first === last ? `step ${short(last)}` : `steps ${short(first)} to ${short(last)}`;
  return h(
    "li",
    { "data-row": name },
    h("b", null, name.slice(PREFIX.length)),
    h("span", { class: "muted" }, ` ${steps} `),
    seen && h("p", null, seen, " ", advice),
  );
}
