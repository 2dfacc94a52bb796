// Rollouts side by side: all of a group below their common prompt, and the answers of two steps to the same prompt with
// their differences marked.

import { button, empty, h, short } from "./dom.js";
import { isSampled, rewardChip, rolloutErrors, split, turnList } from "./rollout_turns.js";
import { diffTexts } from "./text_diff.js";

/** Build the columns of a group; `onOpen(id)` opens one of them. */
export function groupView(rollouts, options, onOpen) {
  if (!rollouts.length) return empty("The group is no longer stored.");
  const [prompt] = split(rollouts[0].content.turns);
  const isShared = rollouts.every((one) => one.prompt_key === rollouts[0].prompt_key);
  return h(
    "div",
    { class: "group-view" },
    isShared &&
      prompt.length > 0 &&
      h("details", { open: true }, h("summary", null, "Prompt"), turnList(prompt, rollouts[0], options)),
    h(
      "div",
      { class: "group-columns", tabindex: "0", role: "group", "aria-label": "Rollouts of the group" },
      rollouts.map((one) =>
        h(
          "article",
          { class: "group-column", "data-rollout": one.rollout_id },
          h(
            "header",
            { class: "row" },
            rewardChip(one.reward, options.edges),
            one.advantage !== null && h("span", { class: "muted" }, `advantage ${short(one.advantage)}`),
            one.num_tokens !== null && h("span", { class: "muted" }, `${short(one.num_tokens)} tokens`),
            button("Open", () => onOpen(one.rollout_id), { class: "quiet small" }),
          ),
          rolloutErrors(one),
          turnList(isShared ? split(one.content.turns)[1] : one.content.turns, one, options),
        ),
      ),
    ),
  );
}

/** Build the answers of two rollouts beside each other, with what only one of them has marked. */
export function diffView(one, other, edges) {
  const pieces = diffTexts(answerOf(one), answerOf(other));
  const side = (rollout, kind, tag) =>
    h(
      "article",
      { class: "group-column", "data-rollout": rollout.rollout_id },
      h(
        "header",
        { class: "row" },
        h("b", null, `step ${short(rollout.step)}`),
        rewardChip(rollout.reward, edges),
        rollout.num_tokens !== null && h("span", { class: "muted" }, `${short(rollout.num_tokens)} tokens`),
      ),
      h(
        "div",
        { class: "prose turn-text" },
        pieces
          .filter((piece) => piece.kind === "same" || piece.kind === kind)
          .map((piece) => (piece.kind === "same" ? piece.text : h(tag, null, piece.text))),
      ),
    );
  return h("div", { class: "group-columns two" }, side(one, "removed", "del"), side(other, "added", "ins"));
}

/** Return what was sampled and what the environment said in between, as one text. */
function answerOf(rollout) {
  const [, turns] = split(rollout.content.turns);
  return turns.map((turn) => (isSampled(turn) ? turn.content : `\n[${turn.role}]\n${turn.content}\n`)).join("");
}
