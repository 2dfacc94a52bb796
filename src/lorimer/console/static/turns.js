// Draws the path through a conversation: each turn with its answers, arrows to other branches, the choice of the answer
// that leads on, and editing in place. Changes the tree only where the user chooses another branch.

import { AnswerView } from "./answers.js";
import { pathOf } from "./conversation.js";
import { button, h, replace } from "./dom.js";
import { imageRow } from "./prompt_images.js";

const MAX_OPEN = 2; // answers of an earlier turn that are shown without asking

/**
 * The log of a conversation. Calls `onchange` after another branch was chosen, `onprompt(step, text)` after a prompt was
 * edited and `onanswer(step, answer, text)` after an answer was; `nameOf(model)` returns a readable name.
 */
export class TurnList {
  constructor(callbacks) {
    this.#callbacks = callbacks;
    this.node = h("div", { class: "turns", role: "log", "aria-label": "Conversation" });
  }

  #callbacks;
  #root;
  #mode;
  #views = new Map();
  #opened = new WeakSet();

  /** Show the path of a tree. */
  draw(root, mode) {
    this.#root = root;
    this.#mode = mode;
    this.#views.clear();
    const path = pathOf(root);
    const hint = mode === "chat" ? "Messages and answers appear here." : "Completions of your prompt appear here.";
    replace(
      this.node,
      path.length ? path.map((step, i) => this.#turn(step, i === path.length - 1)) : h("p", { class: "muted" }, hint),
    );
  }

  viewOf(answer) {
    return this.#views.get(answer);
  }

  /** Enable or disable everything that changes the tree. */
  setBusy(isBusy) {
    for (const node of this.node.querySelectorAll("[data-changes]")) node.disabled = isBusy || node.dataset.end === "1";
  }

  #turn(step, isLast) {
    const { turn, batch } = step;
    const { answers } = batch;
    const isOpen = isLast || answers.length <= MAX_OPEN || this.#opened.has(batch);
    const shown = isOpen ? answers : [step.answer];
    return h(
      "section",
      { class: "play-turn" },
      this.#asked(step),
      this.#pager("Answers", turn, turn.batches),
      columns(shown).map((side) => h("div", { class: "side" }, side.map((one) => this.#answer(step, one)))),
      !isOpen && this.#act(`Show all ${answers.length}`, () => (this.#opened.add(batch), this.#redraw())),
    );
  }

  #asked(step) {
    const { turn, fork } = step;
    const place = h(
      "article",
      { class: "asked" },
      h(
        "h3",
        null,
        this.#mode === "chat" ? "You" : "Prompt",
        this.#pager("Prompts", fork, fork.turns),
        this.#act("Edit", () => edit(place, turn.prompt, "Send edited", (text) => this.#callbacks.onprompt(step, text), () => this.#redraw()), {
          "aria-label": "Edit this prompt",
        }),
      ),
      imageRow(turn.images),
      h("div", { class: "prose" }, turn.prompt),
    );
    return place;
  }

  #answer(step, answer) {
    const { batch } = step;
    const isChosen = answer === step.answer;
    const pick = () => ((batch.chosen = batch.answers.indexOf(answer)), this.#changed());
    const place = h("div", { class: isChosen && batch.answers.length > 1 ? "candidate chosen" : "candidate" });
    const save = (text) => this.#callbacks.onanswer(step, answer, text);
    const actions = [
      batch.answers.length > 1 &&
        this.#act(isChosen ? "Goes on" : "Go on with this", pick, {
          "aria-pressed": String(isChosen),
          title: "The answer that is a part of the history of the next prompt, for every model",
        }),
      this.#mode === "chat" &&
        this.#act("Edit", () => edit(place, answer.text, "Save as a branch", save, () => this.#redraw()), {
          "aria-label": "Edit this answer",
        }),
    ];
    const { nameOf, onswitch } = this.#callbacks;
    const view = new AnswerView(answer, { name: nameOf(answer.model), actions, onswitch });
    this.#views.set(answer, view);
    place.append(view.node);
    return place;
  }

  /** Build arrows between alternatives, "2 / 3"; nothing if there is only one. */
  #pager(what, holder, list) {
    if (list.length < 2) return null;
    const go = (by) => ((holder.shown += by), this.#changed());
    const arrow = (label, sign, by) => {
      const isEnd = !list[holder.shown + by];
      return this.#act(sign, () => go(by), { "aria-label": label, disabled: isEnd, "data-end": isEnd ? "1" : "0" });
    };
    return h(
      "span",
      { class: "pager", role: "group", "aria-label": `${what}: branch ${holder.shown + 1} of ${list.length}` },
      arrow("Previous branch", "‹", -1),
      `${holder.shown + 1} / ${list.length}`,
      arrow("Next branch", "›", 1),
    );
  }

  #act(label, onclick, attrs) {
    return button(label, onclick, { class: "quiet small", "data-changes": "", ...attrs });
  }

  #changed() {
    this.#redraw();
    this.#callbacks.onchange();
  }

  /** Draw again, and keep the focus on the control at the same position. */
  #redraw() {
    const controls = () => [...this.node.querySelectorAll("[data-changes]")];
    const at = controls().indexOf(document.activeElement);
    this.draw(this.#root, this.#mode);
    const same = controls()[Math.max(at, 0)];
    if (at >= 0) (same?.disabled ? controls().find((node) => !node.disabled) : same)?.focus({ preventScroll: true });
  }
}

/** Split answers by the model they are of, if there are two. */
function columns(answers) {
  const sides = [0, 1].map((side) => answers.filter((one) => one.side === side)).filter((side) => side.length);
  return sides.length > 1 ? sides : [answers];
}

/** Replace an article by a field with its text; Ctrl+Enter saves, Escape cancels. */
function edit(place, text, action, onsave, oncancel) {
  const field = h("textarea", { value: text, rows: "4", "aria-label": "Edited text" });
  const save = () => (field.value === text ? oncancel() : onsave(field.value));
  const form = h(
    "form",
    {
      class: "turn-edit",
      onsubmit: (event) => (event.preventDefault(), save()),
      onkeydown: (event) => {
        if (event.key === "Escape") oncancel();
        else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) (event.preventDefault(), save());
      },
    },
    field,
    h(
      "div",
      { class: "row" },
      h("button", { type: "submit", class: "primary small" }, action),
      button("Cancel", oncancel, { class: "quiet small" }),
    ),
  );
  replace(place, form);
  field.focus();
}
